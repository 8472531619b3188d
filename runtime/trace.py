"""Recording of a step as a measured `Timeline`, comparable with the plan's simulated one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..core.errors import InvalidInput
from ..core.plan.schedule import Action
from ..core.plan.timeline import Timeline, TimelineEvent
from ..core.units import name_type

if TYPE_CHECKING:
    from .distributed import DistributedPipeline

CLOCK_READINGS = 16
"""Number of barriers at which the clocks of all ranks are compared."""

Span = tuple[str, float, float]


class Trace:
    """The recorded actions of one rank; `timeline` combines those of all ranks."""

    def __init__(self, pipeline: DistributedPipeline) -> None:
        self._pipeline = pipeline
        self._spans: list[Span] = []
        self._steps: list[int] = []  # of each span, how many steps had been taken
        self._ahead_s = _measure_clock_lead(pipeline)

    def timeline(self) -> Timeline:
        """Return the last complete step, in the time of rank 0's clock; called on every rank.

        Evaluations and interrupted steps are ignored.

        Raises:
            InvalidInput: No step was recorded, or different ones on different ranks.
        """
        pipeline = self._pipeline
        wanted = [str(action) for action in pipeline.schedule.ranks[pipeline.schedule_rank]]
        first = find_last_run([name for name, _, _ in self._spans], wanted)
        whole = [] if first is None else self._spans[first : first + len(wanted)]
        mine = [(name, begin - self._ahead_s, end - self._ahead_s) for name, begin, end in whole]
        step = None if first is None else self._steps[first]
        # All ranks must report one step: a rank whose last step failed would report an earlier one.
        everyone: list[Any] = [None] * pipeline.grid.size
        with pipeline.during("gathering a recording"):
            dist.all_gather_object(everyone, (step, mine), group=pipeline.group)
        steps = {step for step, _ in everyone}
        if steps == {None}:
            raise InvalidInput(
                "no whole step was recorded; take one inside `with record(pipeline)`"
            )
        if len(steps) > 1:
            raise InvalidInput(
                "ranks recorded different steps, so one failed on some of them; record another"
            )
        return _timeline([spans for _, spans in everyone])

    def record_action(self, action: Action, begin_s: float, end_s: float) -> None:
        """Record an action (an `Observer` of the executor)."""
        self._spans.append((str(action), begin_s, end_s))
        self._steps.append(self._pipeline.steps)


@contextmanager
def record(pipeline: DistributedPipeline) -> Iterator[Trace]:
    """Record the steps taken inside, on every rank.

    ::

        with record(pipeline) as trace:
            pipeline.step(batch, target=target)
        trace.timeline().write("step.json")

    Raises:
        InvalidInput: The pipeline runs in one process, where stages do not run side by side.
    """
    if not hasattr(pipeline, "observe"):
        raise InvalidInput(
            f"{name_type(pipeline)} cannot be recorded, because its stages do not run in "
            "processes of their own; use a DistributedPipeline under torchrun"
        )
    found = Trace(pipeline)
    pipeline.observe(found.record_action)
    try:
        yield found
    finally:
        pipeline.observe(None)


def _measure_clock_lead(pipeline: DistributedPipeline) -> float:
    """Return how far this rank's clock is ahead of rank 0's, in seconds.

    No rank leaves a barrier before every rank has entered it. So this clock when leaving, less rank
    0's when entering, is at least the lead, and the other way round at most. The middle of the
    tightest bounds stays right where a rank is often delayed (Cristian, "Probabilistic clock
    synchronization", 1989, takes the shortest round trip for that reason).
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        entered = time.perf_counter()
        pipeline.barrier()
        readings.append((entered, time.perf_counter()))
    mine = torch.tensor(readings, dtype=torch.float64, device=pipeline.device)
    first = mine.clone()
    with pipeline.during("comparing clocks"):
        dist.broadcast(first, group_src=0, group=pipeline.group)
        at_least = float((mine[:, 0] - first[:, 1]).max())
        at_most = float((mine[:, 1] - first[:, 0]).min())
    return (at_least + at_most) / 2


def find_last_run(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Return the start of the last occurrence of the sequence ``wanted`` in ``names``."""
    count = len(wanted)
    starts = range(len(names) - count, -1, -1)
    return next((at for at in starts if list(names[at : at + count]) == list(wanted)), None)


def _timeline(ranks: list[list[Span]]) -> Timeline:
    origin = min(begin for spans in ranks for _, begin, _ in spans)
    length = max(end for spans in ranks for _, _, end in spans) - origin
    events = []
    busy = 0.0
    for rank, spans in enumerate(ranks):
        for name, begin, end in spans:
            action = Action.model_validate(name)
            busy += end - begin
            events.append(
                TimelineEvent(
                    rank=rank,
                    stage=action.stage,
                    kind=action.work,
                    microbatch=action.microbatch,
                    start_s=begin - origin,
                    end_s=end - origin,
                )
            )
    return Timeline(
        source="measured",
        num_ranks=len(ranks),
        step_time_s=length,
        bubble_fraction=max(0.0, 1 - busy / (length * len(ranks))) if length else 0.0,
        events=tuple(sorted(events, key=lambda event: (event.start_s, event.rank))),
    )
