"""Validation of a hand-written schedule before it is run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.errors import InvalidInput
from ..core.plan.schedule import Action, Schedule, Work

Key = tuple[int, Work, int]
"""Stage, work and micro-batch."""

BEFORE: dict[Work, tuple[Work, ...]] = {
    Work.FORWARD: (),
    Work.RECOMPUTE: (Work.FORWARD,),
    Work.BACKWARD: (Work.FORWARD, Work.RECOMPUTE),
    Work.BACKWARD_INPUT: (Work.FORWARD, Work.RECOMPUTE),
    Work.BACKWARD_WEIGHT: (Work.BACKWARD_INPUT,),
}
"""Work that, if present, must come before each kind of work on the same micro-batch."""


def validate(schedule: Schedule) -> None:
    """Accept a schedule that can run a training step or a forward pass, in O(actions).

    The `Schedule` model already guarantees that every forward occurs once and each action on a
    rank of its stage. Beyond that, either there are no backwards, or every micro-batch has one on
    every stage, whole (``B``) or in two parts (``I``, later ``W``); recomputation lies between a
    forward and its backward; and ranks do not deadlock. Stages may lie on ranks in any way.

    Raises:
        InvalidInput: The message names the action and its rank.
    """
    placed = _index_actions(schedule)
    _check_complete(schedule, placed)
    _check_order(placed)
    _check_finishes(schedule, placed)


@dataclass(frozen=True)
class _Slot:
    """Position of an action: its rank and its index among the rank's actions."""

    rank: int
    index: int


def _index_actions(schedule: Schedule) -> dict[Key, _Slot]:
    return {
        _key(action): _Slot(rank, index)
        for rank, actions in enumerate(schedule.ranks)
        for index, action in enumerate(actions)
    }


def _key(action: Action) -> Key:
    return action.stage, action.work, action.microbatch


def _text(key: Key) -> str:
    stage, work, microbatch = key
    return f"{stage}{work.value}{microbatch}"


def _check_complete(schedule: Schedule, placed: dict[Key, _Slot]) -> None:
    """Check that every forward has one backward, or none if the schedule is ``forward_only``."""
    trains = any(work is not Work.FORWARD for _, work, _ in placed)
    if not trains and schedule.name == "forward_only":
        return
    if schedule.name == "forward_only":
        extra = next(key for key in placed if key[1] is not Work.FORWARD)
        raise InvalidInput(
            f"a forward_only schedule has only forwards, but rank {placed[extra].rank} performs "
            f"{_text(extra)}; remove it, or name a training schedule"
        )
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            _check_backward(schedule, placed, stage, microbatch)


def _check_backward(
    schedule: Schedule, placed: dict[Key, _Slot], stage: int, microbatch: int
) -> None:
    found = "".join(
        work.value
        for work in (Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
        if (stage, work, microbatch) in placed
    )
    if found in ("B", "IW"):
        return
    names = " and ".join(f"{stage}{letter}{microbatch}" for letter in found) or "no backward"
    raise InvalidInput(
        f"rank {schedule.rank_of(stage, microbatch)} performs {stage}F{microbatch} and "
        f"{names} for it; add either {stage}B{microbatch}, or both {stage}I{microbatch} and "
        f"{stage}W{microbatch}"
    )


def _check_order(placed: dict[Key, _Slot]) -> None:
    """Check that forward, recomputation, backward and weight part come in this order."""
    for (stage, work, microbatch), place in placed.items():
        for before in BEFORE[work]:
            key = (stage, before, microbatch)
            if key in placed and placed[key].index > place.index:
                raise InvalidInput(
                    f"rank {place.rank} performs {_text((stage, work, microbatch))} before "
                    f"{_text(key)}, which it needs; swap them"
                )


def _check_finishes(schedule: Schedule, placed: dict[Key, _Slot]) -> None:
    """Run every rank's actions as far as possible; actions that remain are deadlocked.

    An action can run once those before it on its rank and those it reads from other stages have.
    """
    # `waiting` maps an action that has not run to the one rank blocked on it, so each action is
    # looked at a constant number of times.
    at = [0] * len(schedule.ranks)
    waiting: dict[Key, int] = {}
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        actions = schedule.ranks[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]
            missing = next(_missing(schedule, placed, at, action), None)
            if missing is not None:
                waiting[missing] = rank
                break
            at[rank] += 1
            if (freed := waiting.pop(_key(action), None)) is not None:
                ready.append(freed)
    if waiting:
        raise InvalidInput(
            f"the schedule deadlocks: {_describe_deadlock(schedule, placed, waiting, at)}"
        )


def _missing(
    schedule: Schedule, placed: dict[Key, _Slot], at: list[int], action: Action
) -> Iterator[Key]:
    """Yield the action of another stage that an action reads, if it has not run yet."""
    stage, work, microbatch = _key(action)
    if work is Work.FORWARD and stage > 0:
        wanted: Key = (stage - 1, Work.FORWARD, microbatch)
    elif work in (Work.BACKWARD, Work.BACKWARD_INPUT) and stage + 1 < schedule.num_stages:
        wanted = (stage + 1, Work.BACKWARD, microbatch)
        if wanted not in placed:
            wanted = (stage + 1, Work.BACKWARD_INPUT, microbatch)
    else:
        return
    if placed[wanted].index >= at[placed[wanted].rank]:
        yield wanted


def _describe_deadlock(
    schedule: Schedule, placed: dict[Key, _Slot], waiting: dict[Key, int], at: list[int]
) -> str:
    """Describe what each rank waits for and what blocks that action."""
    lines = []
    for key, rank in sorted(waiting.items(), key=lambda entry: entry[1]):
        holder = placed[key].rank
        ahead = schedule.ranks[holder][at[holder]]
        behind = f", which comes after {ahead} on rank {holder}" * (_key(ahead) != key)
        lines.append(
            f"rank {rank} cannot run {schedule.ranks[rank][at[rank]]} before {_text(key)}{behind}"
        )
    return "; ".join(lines)
