"""Timelines: the start and end of every action of a step, simulated or measured."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ..document import Document, Record
from .schedule import Work


class TimelineEvent(Record):
    """One piece of work on one rank.

    ``kind`` is a `Work` or a communication: ``sync`` sums a stage's gradients over its replicas,
    ``reduce`` those of weights that several stages share.
    """

    rank: int = Field(ge=0)
    stage: int = Field(ge=0)
    kind: Work | Literal["send_forward", "send_backward", "sync", "reduce"]
    microbatch: int = Field(ge=0)
    start_s: float = Field(ge=0)
    end_s: float = Field(ge=0)


class HeldMemory(Record):
    """The activations one rank holds from a moment on, until the next change."""

    rank: int = Field(ge=0)
    time_s: float = Field(ge=0)
    held_bytes: int = Field(ge=0)


class Timeline(Document):
    """Events of one training step.

    Attributes:
        step_time_s: From the first action to the last, gradient synchronisation included.
        bubble_fraction: Idle share of all ranks' time.
        peak_activation_bytes: Highest sum of saved activations on each rank.
        memory: How that sum changes, rank by rank in order of time; with events alone.
    """

    SCHEMA: ClassVar[str] = "stagewright.timeline/1"

    schema_version: Literal["stagewright.timeline/1"] = "stagewright.timeline/1"
    source: Literal["simulated", "measured"]
    num_ranks: int = Field(ge=1)
    step_time_s: float = Field(ge=0)
    bubble_fraction: float = Field(ge=0, le=1)
    peak_activation_bytes: tuple[int, ...] = ()
    memory: tuple[HeldMemory, ...] = ()
    events: tuple[TimelineEvent, ...] = ()
