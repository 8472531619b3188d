"""Deadlock check for replicas that synchronise in the middle of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...core.plan.schedule import BACKWARDS, Action, Schedule, Work

Key = tuple[int, Work, int]
"""Stage, work and micro-batch."""


def describe_imbalance(schedule: Schedule, stage: int) -> str:
    """Explain how the kinds of work of a stage's replicas differ; empty if they are the same.

    Replicas that synchronise in every action need the same kinds of work in the same order.
    """
    replicas = schedule.stage_ranks[stage]
    kinds = [
        "".join(action.work.value for action in schedule.ranks[rank] if action.stage == stage)
        for rank in replicas
    ]
    for rank, found in zip(replicas, kinds, strict=True):
        if len(found) != len(kinds[0]):
            return (
                f"its {len(replicas)} replicas share {schedule.num_microbatches} micro-batches, so "
                "some have more to do"
            )
        if found != kinds[0]:
            return f"rank {replicas[0]} works in the order {kinds[0]}, rank {rank} in {found}"
    return ""


def can_finish(schedule: Schedule, every: Collection[int], last: Collection[int]) -> bool:
    """Return True if a step finishes although replicas synchronise in some of their actions.

    Simulates the step without times, performing actions for as long as any can be. The actions of
    a synchronisation point are performed all at once, when each is the next of its rank and its
    inputs have arrived. Performing an action never makes another impossible, so the order of
    events does not matter: what gets stuck here gets stuck in any timing. O(actions x ranks).

    Args:
        schedule: A schedule that finishes without synchronisation.
        every: Stages whose replicas synchronise in every action; see `describe_imbalance`.
        last: Stages whose replicas synchronise in each one's last backward.
    """
    progress = _Progress(schedule, _synchronisation_points(schedule, every, last))
    while progress.advance():
        pass
    return progress.is_done


def _synchronisation_points(
    schedule: Schedule, every: Collection[int], last: Collection[int]
) -> dict[Key, tuple[Key, ...]]:
    """Return, for each action at a synchronisation point, all actions that belong to it."""
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
        found.update((key, point) for point in together for key in point)
    return found


@dataclass
class _Progress:
    """Progress of every rank through a step.

    Attributes:
        points: For each action at a synchronisation point, all actions that belong to it.
        at: For each rank, the number of actions performed.
        done: All actions performed.
    """

    schedule: Schedule
    points: dict[Key, tuple[Key, ...]]
    at: list[int] = field(init=False)
    done: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.at = [0] * len(self.schedule.ranks)

    @property
    def is_done(self) -> bool:
        return all(
            at == len(actions) for at, actions in zip(self.at, self.schedule.ranks, strict=True)
        )

    def advance(self) -> bool:
        """Perform every action that can be; return False if there was none."""
        can = {_key(action) for action in self._next() if self._has_arrived(action)}
        before = len(self.done)
        for key in can:
            point = self.points.get(key, (key,))
            if key not in self.done and can.issuperset(point):
                self.done.update(point)
        for rank, actions in enumerate(self.schedule.ranks):
            while self.at[rank] < len(actions) and _key(actions[self.at[rank]]) in self.done:
                self.at[rank] += 1
        return len(self.done) > before

    def _next(self) -> Iterator[Action]:
        for at, actions in zip(self.at, self.schedule.ranks, strict=True):
            if at < len(actions):
                yield actions[at]

    def _has_arrived(self, action: Action) -> bool:
        # Direct sends need no edges here: they never come before what a relay would have brought.
        stage, microbatch = action.stage, action.microbatch
        if action.work is Work.FORWARD and stage:
            return (stage - 1, Work.FORWARD, microbatch) in self.done
        if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
            following = stage + 1
            return following == self.schedule.num_stages or any(
                (following, work, microbatch) in self.done
                for work in (Work.BACKWARD, Work.BACKWARD_INPUT)
            )
        return True


def _key(action: Action) -> Key:
    return action.stage, action.work, action.microbatch
