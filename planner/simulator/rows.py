"""The events of a simulated step as plain rows; large steps have a hundred thousand.

`simulate` makes a `Timeline` of them, drawings take them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ...schedules.action_order import BACKWARD, BACKWARD_INPUT, FORWARD, WORKS, ActionOrder
from ...schedules.activation_memory import activation_changes
from .durations import StageTimes
from .event_loop import SimulatedStep

MAKERS = (FORWARD, BACKWARD, BACKWARD_INPUT)
"""Works that make something for other stages."""


class EventRow(NamedTuple):
    """The fields of a `TimelineEvent`."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float


class HeldRow(NamedTuple):
    """The fields of a `HeldMemory`."""

    rank: int
    time_s: float
    held_bytes: int


class StepRows(NamedTuple):
    """A step's events and held memory, rank by rank; held memory in order of time."""

    events: Sequence[EventRow]
    held: Sequence[HeldRow]


def held_rows(order: ActionOrder, times: StageTimes, step: SimulatedStep) -> list[HeldRow]:
    """Return the activation bytes a rank holds after each change."""
    held: list[HeldRow] = []
    come, go = activation_changes(order, times.saved_bytes, times.recomputed_bytes)
    rows = zip(
        order.ranks.tolist(), come.tolist(), go.tolist(),
        step.start_s.tolist(), step.end_s.tolist(), strict=True,
    )  # fmt: skip
    for rank, coming, going, start_s, end_s in rows:
        for change, time_s in ((coming, start_s), (-going, end_s)):
            before = held[-1].held_bytes if held and held[-1].rank == rank else 0
            if change:
                held.append(HeldRow(rank, time_s, before + change))
    return held


def event_rows(order: ActionOrder, times: StageTimes, step: SimulatedStep) -> list[EventRow]:
    """Return each rank's actions with the messages they send, then its gradient sums."""
    rows = zip(
        order.ranks.tolist(), order.stage.tolist(), order.work.tolist(), order.microbatch.tolist(),
        step.start_s.tolist(), step.end_s.tolist(), strict=True,
    )  # fmt: skip
    names = [str(work) for work in WORKS]
    by_rank: list[list[EventRow]] = [[] for _ in range(order.num_ranks)]
    for rank, stage, work, microbatch, start_s, end_s in rows:
        events = by_rank[rank]
        events.append(EventRow(rank, stage, names[work], microbatch, start_s, end_s))
        if work not in MAKERS:
            continue
        kind = "send_forward" if work == FORWARD else "send_backward"
        for sent_s, send_s in step.sends(stage, microbatch, backward=work != FORWARD):
            events.append(EventRow(rank, stage, kind, microbatch, sent_s, sent_s + send_s))
    for event in _sums(order, times, step):
        by_rank[event.rank].append(event)
    return list(chain.from_iterable(by_rank))


def _sums(order: ActionOrder, times: StageTimes, step: SimulatedStep) -> Iterator[EventRow]:
    """Yield gradient sums over each stage's replicas, then those over tied weights."""
    for stage, sync_s in enumerate(times.sync_s if order.trains else ()):
        start_s = float(step.done_s[stage])
        for rank in order.stage_ranks[stage] if sync_s > 0 else ():
            yield EventRow(rank, stage, "sync", 0, start_s, start_s + sync_s)
    if times.tied_sync_s > 0:
        for rank in range(order.num_ranks):
            stages = (at for at, ranks in enumerate(order.stage_ranks) if rank in ranks)
            yield EventRow(rank, min(stages), "reduce", 0, step.last_end_s, step.step_time_s)
