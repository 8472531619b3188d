"""Simulated timeline and step time of a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ...core.errors import InvalidInput
from ...core.plan.schedule import Schedule, ScheduleName
from ...core.plan.timeline import HeldMemory, Timeline, TimelineEvent
from ...schedules.action_order import WORKS, ActionOrder, make_order
from ...schedules.activation_memory import peak_activation_bytes
from ...schedules.layout import copies
from .durations import StageTimes as StageTimes
from .event_loop import SimulatedStep, bubble_fraction, simulate_step
from .rows import StepRows, event_rows, held_rows

MAX_KEPT = 10_000
"""Micro-batches times stages up to which orders are kept: plans with other cuts have the same."""

_keep_order = lru_cache(maxsize=32)(make_order)


def step_time(
    name: ScheduleName,
    times: StageTimes,
    num_microbatches: int,
    replicas: Sequence[int] = (),
    depths: Sequence[int] = (),
    chunks: int = 1,
) -> tuple[float, float]:
    """Return the step time and bubble fraction of a schedule, bit for bit those of `simulate`.

    Where g divides the replicas of every stage, the micro-batches fall into g pipelines that
    never interact, unless links are shared: simulating one with the most micro-batches is enough.
    So this costs O(S m / g). `make_schedule` explains the arguments and what is raised.
    """
    replicas = tuple(replicas) or (1,) * times.num_stages
    parts = 1 if times.shares_channels else math.gcd(*replicas)
    sizes = copies(num_microbatches, parts)[: 1 if chunks == 1 else 2]
    alone = tuple(count // parts for count in replicas)
    make = make_order if sizes[0] * times.num_stages > MAX_KEPT else _keep_order
    orders = [make(name, dealt, alone, tuple(depths), chunks) for dealt in sizes]
    longest_s = max(simulate_step(order, times).step_time_s for order in orders)
    if len(orders) == 1:  # a stage does the same for every micro-batch
        counts = orders[0].counts * num_microbatches // sizes[0]
    else:
        more = num_microbatches % parts
        counts = orders[0].counts * more + orders[1].counts * (parts - more)
    return longest_s, bubble_fraction(counts, times, longest_s, sum(replicas) // chunks)


def simulate(schedule: Schedule, times: StageTimes, *, with_events: bool = True) -> Timeline:
    """Simulate one step and return its timeline.

    `simulate_step` defines when each action starts. Once all replicas of a stage have done their
    last backward, their gradients are summed; when everything is done, every rank waits for the
    gradients of tied weights to be summed. The bubble counts all time in which a rank neither
    computes forward nor backward. O(actions).

    Args:
        schedule: Forwards and backwards, whole or split. Recomputation may be in ``backward_s``
            alone; where it stands in the schedule, it is shown as the first part of a backward.
        times: Durations, one entry a stage.
        with_events: Leave out to learn only the step time, bubble and peak.

    Raises:
        InvalidInput: The durations do not fit the schedule, or the schedule can never finish:
            the message says what each rank waits for.
    """
    order = _order_of(schedule)
    step = simulate_step(order, times)
    peaks: tuple[int, ...] = ()
    if len(times.saved_bytes):
        peaks = peak_activation_bytes(order, times.saved_bytes, times.recomputed_bytes)
    return Timeline(
        source="simulated",
        num_ranks=order.num_ranks,
        step_time_s=step.step_time_s,
        bubble_fraction=bubble_fraction(order.counts, times, step.step_time_s, order.num_ranks),
        peak_activation_bytes=peaks,
        memory=_memory(order, times, step) if with_events and len(peaks) else (),
        events=_events(order, times, step) if with_events else (),
    )


def simulate_rows(schedule: Schedule | ActionOrder, times: StageTimes) -> StepRows:
    """Simulate a step and return plain rows, ten times as fast as building a `Timeline`."""
    order = _order_of(schedule) if isinstance(schedule, Schedule) else schedule
    step = simulate_step(order, times)
    held = held_rows(order, times, step) if len(times.saved_bytes) else []
    return StepRows(event_rows(order, times, step), held)


def _memory(order: ActionOrder, times: StageTimes, step: SimulatedStep) -> tuple[HeldMemory, ...]:
    rows = held_rows(order, times, step)
    return tuple(
        HeldMemory(rank=rank, time_s=time_s, held_bytes=held) for rank, time_s, held in rows
    )


def _events(
    order: ActionOrder, times: StageTimes, step: SimulatedStep
) -> tuple[TimelineEvent, ...]:
    rows = event_rows(order, times, step)
    return tuple(TimelineEvent.model_validate(row._asdict()) for row in rows)


def _order_of(schedule: Schedule) -> ActionOrder:
    """Return a schedule's actions as arrays; it may be written by hand and is checked."""
    rows = [
        (action.stage, _NUMBERS[action.work], action.microbatch)
        for actions in schedule.ranks
        for action in actions
    ]
    stage, work, microbatch = np.array(rows, np.int64).T.copy()
    first_action = np.cumsum([0, *map(len, schedule.ranks)])
    order = ActionOrder(
        schedule.num_microbatches, schedule.stage_ranks, first_action, stage, work, microbatch
    )
    _check_backwards(order)
    return order


_NUMBERS = {work: number for number, work in enumerate(WORKS)}


def _check_backwards(order: ActionOrder) -> None:
    """Raise unless every micro-batch runs backward once on every stage, or none does."""
    if not order.trains:
        return
    expected = order.num_stages * order.num_microbatches
    done = np.zeros((len(WORKS), expected), np.int64)
    done[order.work, order.stage * order.num_microbatches + order.microbatch] = 1
    _, whole, first, second, _ = done
    if (whole + first != 1).any() or (first != second).any():
        raise InvalidInput(
            f"{whole.sum()} whole backwards, {first.sum()} input and {second.sum()} weight parts "
            f"for {order.num_stages} stages x {order.num_microbatches} micro-batches; every one "
            "must run once, whole or in both parts, or none at all"
        )
