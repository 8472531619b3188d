"""Pipeline schedules: each rank's actions in order, as read by the simulator and the runtime."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_serializer, model_validator

from ..document import Document, Record


class Work(StrEnum):
    """Kind of work of an action.

    ``B`` is a whole backward. ``I`` and ``W`` split it into gradients of inputs and of weights
    (zero-bubble schedules); ``R`` recomputes a forward before its backward.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"


POSTED_AHEAD = 2
"""Receives that a rank posts ahead of the one it reads, for each kind of message to a stage.

One message travels while another waits to be used. On a GPU a posted receive starts when the work
launched before it is done, so the second one is what lets a message travel during the action before
the one that reads it. Plans count their memory; more would take more.
"""

BACKWARDS = (Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
"""The kinds of work that add to gradients of weights."""

_ACTION = re.compile(r"(\d+)([FBIWR])(\d+)")


class Action(Record):
    """One piece of work on one micro-batch of one stage.

    In JSON it is the text ``<stage><work><microbatch>``, e.g. ``2F0``.
    """

    stage: int = Field(ge=0)
    work: Work
    microbatch: int = Field(ge=0)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, data: Any) -> Any:
        # An action already, or its fields by name.
        if not isinstance(data, str):
            return data
        match = _ACTION.fullmatch(data)
        if match is None:
            raise ValueError(f"cannot read action {data!r}; write e.g. '2F0'")
        return {"stage": int(match[1]), "work": match[2], "microbatch": int(match[3])}

    @model_serializer
    def _text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.stage}{self.work.value}{self.microbatch}"


TrainingSchedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zero_bubble",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
ScheduleName = TrainingSchedule | Literal["forward_only"]


class Schedule(Document):
    """Actions of each rank in the order it performs them.

    Communication is implied: an action starts when the tensors it needs have arrived, and what
    it makes is sent at once.

    Attributes:
        name: ``custom`` for an order of work that none of ours has.
        stage_ranks: The ranks that hold each stage, its replicas; micro-batch k is done by entry
            k mod length.
        ranks: For each rank its actions, first to last.
    """

    SCHEMA: ClassVar[str] = "stagewright.schedule/1"

    schema_version: Literal["stagewright.schedule/1"] = "stagewright.schedule/1"
    name: ScheduleName | Literal["custom"]
    num_microbatches: int = Field(ge=1)
    stage_ranks: tuple[tuple[int, ...], ...] = Field(min_length=1)
    ranks: tuple[tuple[Action, ...], ...] = Field(min_length=1)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a micro-batch of a stage."""
        replicas = self.stage_ranks[stage]
        return replicas[microbatch % len(replicas)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in order."""
        return tuple(stage for stage, ranks in enumerate(self.stage_ranks) if rank in ranks)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_stage_ranks()
        seen: set[tuple[int, Work, int]] = set()
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                self._check_action(rank, action)
                key = (action.stage, action.work, action.microbatch)
                if key in seen:
                    raise ValueError(f"{action} is performed twice")
                seen.add(key)
        # All are distinct and within range by now, so the right number means that none is missing.
        forwards = sum(work is Work.FORWARD for _, work, _ in seen)
        if forwards != self.num_stages * self.num_microbatches:
            raise ValueError(
                f"{forwards} forwards for {self.num_stages} stages x "
                f"{self.num_microbatches} micro-batches; every one must run once"
            )
        return self

    def _check_stage_ranks(self) -> None:
        for stage, replicas in enumerate(self.stage_ranks):
            if not replicas or len(set(replicas)) < len(replicas):
                raise ValueError(f"stage {stage} is on ranks {replicas}; it needs distinct ranks")
            if min(replicas) < 0 or max(replicas) >= len(self.ranks):
                raise ValueError(f"stage {stage} is on ranks {replicas} of {len(self.ranks)}")
        idle = set(range(len(self.ranks))).difference(*self.stage_ranks)
        if idle:
            raise ValueError(f"rank {min(idle)} holds no stage")

    def _check_action(self, rank: int, action: Action) -> None:
        if action.stage >= self.num_stages or rank not in self.stage_ranks[action.stage]:
            raise ValueError(f"rank {rank} performs {action}, a stage it does not hold")
        if action.microbatch >= self.num_microbatches:
            raise ValueError(
                f"{action} names micro-batch {action.microbatch} of {self.num_microbatches}"
            )
        # Replicas take micro-batches in turn; another one would wait for data that never comes.
        right = self.rank_of(action.stage, action.microbatch)
        if right != rank:
            raise ValueError(f"rank {rank} performs {action}, which belongs to rank {right}")
