"""Deadlock check for replicas that synchronise in the middle of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ...core.plan.schedule import BACKWARDS, Schedule, Work

Key = tuple[int, Work, int]
"""Stage, work and micro-batch; a negative number for a round without work."""


class Round(NamedTuple):
    """Action of every replica of a stage, of which some may have no work in it."""

    work: Work
    is_own: bool


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


def are_equal(rounds: Sequence[Sequence[Round]]) -> bool:
    """Return True if all replicas have the same kinds of work in the same order."""
    return bool(rounds) and all(each.is_own for row in rounds for each in row)


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
    order = [[(a.stage, a.work, a.microbatch) for a in actions] for actions in schedule.ranks]
    points: dict[Key, tuple[Key, ...]] = {}
    for stage in every:
        points.update(_meet_in_rounds(schedule, stage, order))
    for stage in set(last).difference(every):
        own = [[key for key in order[r] if key[0] == stage] for r in schedule.stage_ranks[stage]]
        ends = [[key for key in keys if key[1] in BACKWARDS][-1:] for keys in own]
        together = tuple(key for end in ends for key in end)
        points.update(dict.fromkeys(together, together))
    left, done = [deque(keys) for keys in order], set[Key]()
    while any(left):
        can = {keys[0] for keys in left if keys and _has_arrived(keys[0], done, schedule)}
        performed = {key for key in can if can.issuperset(points.get(key, ()))}
        if not performed:
            return False
        done |= performed
        for keys in left:
            if keys and keys[0] in performed:
                keys.popleft()
    return True


def _meet_in_rounds(
    schedule: Schedule, stage: int, order: list[list[Key]]
) -> Iterator[tuple[Key, tuple[Key, ...]]]:
    """Yield, for each key of a stage, all keys of its round, with those added to the order.

    A replica without work in a round goes through it as soon as its action before is done.
    """
    rows = []
    for rank, rounds in zip(schedule.stage_ranks[stage], list_rounds(schedule, stage), strict=True):
        keys = iter([key for key in order[rank] if key[0] == stage])
        behind, row = 0, list[Key]()
        for at, each in enumerate(rounds):
            if each.is_own:
                row.append(next(keys))
                behind = order[rank].index(row[-1])
            else:
                row.append((stage, each.work, -1 - at - len(rounds) * rank))
                order[rank].insert(behind, row[-1])
            behind += 1
        rows.append(row)
    for together in zip(*rows, strict=True):
        yield from ((key, together) for key in together)


def _has_arrived(key: Key, done: Collection[Key], schedule: Schedule) -> bool:
    # Direct sends need no edges here: they never come before what a relay would have brought.
    stage, work, microbatch = key
    if microbatch >= 0 and work is Work.FORWARD and stage:
        return (stage - 1, Work.FORWARD, microbatch) in done
    if microbatch >= 0 and work in (Work.BACKWARD, Work.BACKWARD_INPUT):
        behind = [(stage + 1, each, microbatch) for each in (Work.BACKWARD, Work.BACKWARD_INPUT)]
        return stage + 1 == schedule.num_stages or any(each in done for each in behind)
    return True
