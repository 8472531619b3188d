"""Whether replicas that wait for each other in the middle of a step can ever finish it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...core.plan.schedule import BACKWARDS, Action, Schedule, Work

Key = tuple[int, Work, int]
"""Stage, work and micro-batch."""


def describe_imbalance(schedule: Schedule, stage: int) -> str:
    """Why a stage's replicas do not do the same kinds of work in one order; empty if they do."""
    replicas = schedule.stage_ranks[stage]
    kinds = [
        "".join(action.work.value for action in schedule.ranks[rank] if action.stage == stage)
        for rank in replicas
    ]
    for rank, found in zip(replicas, kinds, strict=True):
        if len(found) != len(kinds[0]):
            return (
                f"its replicas have {schedule.num_microbatches} micro-batches between "
                f"{len(replicas)} of them, so some have more to do"
            )
        if found != kinds[0]:
            return f"rank {replicas[0]} works in the order {kinds[0]}, rank {rank} in {found}"
    return ""


def can_finish(schedule: Schedule, every: Collection[int], last: Collection[int]) -> bool:
    """Whether a step ends if replicas wait for each other in some of their actions.

    Actions are performed as far as they go: those of a meeting all at once, when each is the next
    of its rank and what it reads of other stages is there. O(actions x ranks).

    Args:
        schedule: One that finishes without any meeting.
        every: Stages whose replicas meet in every action; see `describe_imbalance`.
        last: Stages whose replicas meet in the last backward of each.
    """
    course = _Course(schedule, _meetings(schedule, every, last))
    while course.moves():
        pass
    return course.is_done


def _meetings(
    schedule: Schedule, every: Collection[int], last: Collection[int]
) -> dict[Key, tuple[Key, ...]]:
    """For each action that is a meeting, those that belong to it."""
    found: dict[Key, tuple[Key, ...]] = {}
    for stage, replicas in enumerate(schedule.stage_ranks):
        own = [[_key(a) for a in schedule.ranks[rank] if a.stage == stage] for rank in replicas]
        if stage in every:
            together = list(zip(*own, strict=True))
        elif stage in last:
            ends = [[key for key in keys if key[1] in BACKWARDS][-1:] for keys in own]
            together = [tuple(key for end in ends for key in end)]
        else:
            continue
        found.update((key, meeting) for meeting in together for key in meeting)
    return found


@dataclass
class _Course:
    """How far every rank has come.

    Attributes:
        at: Of each rank, how many actions are done.
        done: Those actions.
    """

    schedule: Schedule
    meetings: dict[Key, tuple[Key, ...]]
    at: list[int] = field(init=False)
    done: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.at = [0] * len(self.schedule.ranks)

    @property
    def is_done(self) -> bool:
        return all(
            at == len(actions) for at, actions in zip(self.at, self.schedule.ranks, strict=True)
        )

    def moves(self) -> bool:
        """Perform what can be; whether that was anything."""
        can = {_key(action) for action in self._next() if self._has_arrived(action)}
        before = len(self.done)
        for key in can:
            meeting = self.meetings.get(key, (key,))
            if key not in self.done and can.issuperset(meeting):
                self.done.update(meeting)
        for rank, actions in enumerate(self.schedule.ranks):
            while self.at[rank] < len(actions) and _key(actions[self.at[rank]]) in self.done:
                self.at[rank] += 1
        return len(self.done) > before

    def _next(self) -> Iterator[Action]:
        for at, actions in zip(self.at, self.schedule.ranks, strict=True):
            if at < len(actions):
                yield actions[at]

    def _has_arrived(self, action: Action) -> bool:
        """Whether what an action reads of another stage is there."""
        stage, microbatch = action.stage, action.microbatch
        if action.work is Work.FORWARD and stage:
            return (stage - 1, Work.FORWARD, microbatch) in self.done
        if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
            behind = stage + 1
            return behind == self.schedule.num_stages or any(
                (behind, work, microbatch) in self.done
                for work in (Work.BACKWARD, Work.BACKWARD_INPUT)
            )
        return True


def _key(action: Action) -> Key:
    return action.stage, action.work, action.microbatch
