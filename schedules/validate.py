"""Whether a schedule that someone wrote can be run: checked before anything is."""

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
"""What has to stand before each work on the same micro-batch, where it is there at all."""


def validate(schedule: Schedule) -> None:
    """Accept a schedule that a training step or a forward can be run by.

    A `Schedule` is already known to name every forward once and each action on the rank it belongs
    to. Beyond that: either nothing goes backward, or every micro-batch does on every stage, whole
    (``B``) or in both parts (``I``, later ``W``); recomputation stands between a forward and its
    backward; and no ranks wait for each other for ever. Stages may lie on ranks in any way, also
    more on one rank than on another. O(actions).

    Raises:
        InvalidInput: Naming the action, and the rank where it stands.
    """
    placed = _placed(schedule)
    _check_complete(schedule, placed)
    _check_order(placed)
    _check_finishes(schedule, placed)


@dataclass(frozen=True)
class _Place:
    """Where an action stands."""

    rank: int
    index: int


def _placed(schedule: Schedule) -> dict[Key, _Place]:
    return {
        _key(action): _Place(rank, index)
        for rank, actions in enumerate(schedule.ranks)
        for index, action in enumerate(actions)
    }


def _key(action: Action) -> Key:
    return action.stage, action.work, action.microbatch


def _text(key: Key) -> str:
    stage, work, microbatch = key
    return f"{stage}{work.value}{microbatch}"


def _check_complete(schedule: Schedule, placed: dict[Key, _Place]) -> None:
    """One backward for every forward, or none at all, as the schedule's name says."""
    trains = any(work is not Work.FORWARD for _, work, _ in placed)
    if not trains and schedule.name == "forward_only":
        return
    if schedule.name == "forward_only":
        extra = next(key for key in placed if key[1] is not Work.FORWARD)
        raise InvalidInput(
            f"a forward_only schedule has forwards alone, and rank {placed[extra].rank} performs "
            f"{_text(extra)}; leave it out, or name a schedule that trains"
        )
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            _check_backward(schedule, placed, stage, microbatch)


def _check_backward(
    schedule: Schedule, placed: dict[Key, _Place], stage: int, microbatch: int
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
        f"{names} of it; give it either {stage}B{microbatch}, or both {stage}I{microbatch} and "
        f"{stage}W{microbatch}"
    )


def _check_order(placed: dict[Key, _Place]) -> None:
    """Forward, recomputation, backward, weight part: in this order on their rank."""
    for (stage, work, microbatch), place in placed.items():
        for before in BEFORE[work]:
            key = (stage, before, microbatch)
            if key in placed and placed[key].index > place.index:
                raise InvalidInput(
                    f"rank {place.rank} performs {_text((stage, work, microbatch))} before "
                    f"{_text(key)}, which it needs; exchange them"
                )


def _check_finishes(schedule: Schedule, placed: dict[Key, _Place]) -> None:
    """Perform every rank's actions as far as they go.

    An action is performed when those before it on its rank are, and those it reads of other
    stages. What then is left waits in a circle.
    """
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
        raise InvalidInput(f"the schedule never finishes: {_stuck(schedule, placed, waiting, at)}")


def _missing(
    schedule: Schedule, placed: dict[Key, _Place], at: list[int], action: Action
) -> Iterator[Key]:
    """What an action reads of another stage and is not done yet."""
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


def _stuck(
    schedule: Schedule, placed: dict[Key, _Place], waiting: dict[Key, int], at: list[int]
) -> str:
    """What each rank waits for, and what keeps that from being done."""
    lines = []
    for key, rank in sorted(waiting.items(), key=lambda entry: entry[1]):
        holder = placed[key].rank
        ahead = schedule.ranks[holder][at[holder]]
        behind = f", which stands behind {ahead} on rank {holder}" * (_key(ahead) != key)
        lines.append(
            f"rank {rank} cannot do {schedule.ranks[rank][at[rank]]} before {_text(key)}{behind}"
        )
    return "; ".join(lines)
