"""Deadlock check for replicas that synchronise in the middle of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.plan.schedule import BACKWARDS, Action, Schedule, Work

Key = tuple[int, Work, int]
"""Stage, work and micro-batch; a negative number for a round without work."""


class Round(NamedTuple):
    """Action of every replica of a stage, of which some may have no work in it."""

    work: Work
    is_own: bool


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


def list_rounds(schedule: Schedule, stage: int) -> list[list[Round]]:
    """Return the rounds of each replica of a stage, as many as the busiest has actions.

    The others go along with it, and do each of their actions in the first round of its kind; empty
    if the busiest has no such round.
    """
    own = [
        [a.work for a in schedule.ranks[r] if a.stage == stage] for r in schedule.stage_ranks[stage]
    ]
    busiest = max(own, key=len)
    found = []
    for works in own:
        waiting = deque(works)
        rounds = [
            Round(work, bool(waiting) and waiting[0] is work and waiting.popleft() is work)
            for work in busiest
        ]
        if waiting:
            return []
        found.append(rounds)
    return found


def can_finish(schedule: Schedule, every: Collection[int], last: Collection[int]) -> bool:
    """Return True if a step finishes although replicas synchronise in some of their actions.

    Simulates the step without times, performing actions for as long as any can be. The actions of
    a synchronisation point are performed all at once, when each is the next of its rank and its
    inputs have arrived. Performing an action never makes another impossible, so the order of
    events does not matter: what gets stuck here gets stuck in any timing. O(actions x ranks).

    Args:
        schedule: A schedule that finishes without synchronisation.
        every: Stages whose replicas synchronise in every action; see `list_rounds`.
        last: Stages whose replicas synchronise in each one's last backward.
    """
    order = [[_key(action) for action in actions] for actions in schedule.ranks]
    points: dict[Key, tuple[Key, ...]] = {}
    for stage in every:
        points.update(_meet_in_rounds(schedule, stage, order))
    for stage in set(last).difference(every):
        own = [[key for key in order[r] if key[0] == stage] for r in schedule.stage_ranks[stage]]
        ends = [[key for key in keys if key[1] in BACKWARDS][-1:] for keys in own]
        together = tuple(key for end in ends for key in end)
        points.update(dict.fromkeys(together, together))
    progress = _Progress(schedule.num_stages, order, points)
    while progress.advance():
        pass
    return progress.is_done


def _meet_in_rounds(
    schedule: Schedule, stage: int, order: list[list[Key]]
) -> Iterator[tuple[Key, tuple[Key, ...]]]:
    """Yield, for each key of a stage, all keys of its round, with those added to the order.

    A replica without work in a round goes through it as soon as its action before is done.
    """
    rows = []
    for rank, rounds in zip(schedule.stage_ranks[stage], list_rounds(schedule, stage), strict=True):
        keys = iter([key for key in order[rank] if key[0] == stage])
        row = [
            next(keys) if each.is_own else (stage, each.work, -1 - at - len(rounds) * rank)
            for at, each in enumerate(rounds)
        ]
        behind = 0
        for at, key in enumerate(row):
            if not rounds[at].is_own:
                order[rank].insert(behind, key)
            behind = order[rank].index(key) + 1
        rows.append(row)
    for together in zip(*rows, strict=True):
        yield from ((key, together) for key in together)


@dataclass
class _Progress:
    """Progress of every rank through a step.

    Attributes:
        order: The keys of every rank.
        points: For each key at a synchronisation point, all keys that belong to it.
        at: For each rank, the number of keys performed.
        done: All keys performed.
    """

    num_stages: int
    order: list[list[Key]]
    points: dict[Key, tuple[Key, ...]]
    at: list[int] = field(init=False)
    done: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.at = [0] * len(self.order)

    @property
    def is_done(self) -> bool:
        return all(at == len(keys) for at, keys in zip(self.at, self.order, strict=True))

    def advance(self) -> bool:
        """Perform every action that can be; return False if there was none."""
        following = [k[at] for at, k in zip(self.at, self.order, strict=True) if at < len(k)]
        can = {key for key in following if self._has_arrived(key)}
        before = len(self.done)
        for key in can:
            point = self.points.get(key, (key,))
            if key not in self.done and can.issuperset(point):
                self.done.update(point)
        for rank, keys in enumerate(self.order):
            while self.at[rank] < len(keys) and keys[self.at[rank]] in self.done:
                self.at[rank] += 1
        return len(self.done) > before

    def _has_arrived(self, key: Key) -> bool:
        # Direct sends need no edges here: they never come before what a relay would have brought.
        stage, work, microbatch = key
        if microbatch >= 0 and work is Work.FORWARD and stage:
            return (stage - 1, Work.FORWARD, microbatch) in self.done
        if microbatch >= 0 and work in (Work.BACKWARD, Work.BACKWARD_INPUT):
            following = stage + 1
            return following == self.num_stages or any(
                (following, work, microbatch) in self.done
                for work in (Work.BACKWARD, Work.BACKWARD_INPUT)
            )
        return True


def _key(action: Action) -> Key:
    return action.stage, action.work, action.microbatch
