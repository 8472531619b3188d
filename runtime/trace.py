"""What ran when: a step as a `Timeline`, measured where the plan has a simulated one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..core.errors import InvalidInput
from ..core.plan.schedule import Action
from ..core.plan.timeline import Timeline, TimelineEvent

if TYPE_CHECKING:
    from .distributed import DistributedPipeline

CLOCK_READINGS = 9
"""Times at which all ranks read their clocks together; the median is taken."""

Span = tuple[str, float, float]


class Trace:
    """The actions of one rank while it was recorded; `timeline` puts all ranks' together."""

    def __init__(self, pipeline: DistributedPipeline) -> None:
        self._pipeline = pipeline
        self._spans: list[Span] = []
        self._steps: list[int] = []  # of each span, how many steps had been taken
        self._ahead_s = _ahead_of_rank_0(pipeline)

    def timeline(self) -> Timeline:
        """The last whole step that was recorded, by the clock of rank 0; called on every rank.

        Evaluations, and steps that an error ended, are passed over.

        Raises:
            InvalidInput: No step was recorded, or not the same one on every rank.
        """
        pipeline = self._pipeline
        wanted = [str(action) for action in pipeline.schedule.ranks[pipeline.rank]]
        first = find_last_run([name for name, _, _ in self._spans], wanted)
        whole = [] if first is None else self._spans[first : first + len(wanted)]
        mine = [(name, begin - self._ahead_s, end - self._ahead_s) for name, begin, end in whole]
        step = None if first is None else self._steps[first]
        everyone: list[Any] = [None] * len(pipeline.schedule.ranks)
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

    def note(self, action: Action, begin_s: float, end_s: float) -> None:
        """What the executor tells of each action."""
        self._spans.append((str(action), begin_s, end_s))
        self._steps.append(self._pipeline.steps)


@contextmanager
def record(pipeline: DistributedPipeline) -> Iterator[Trace]:
    """Record the steps taken inside, on every rank::

        with record(pipeline) as trace:
            pipeline.step(batch, target=target)
        trace.timeline().write("step.json")

    On GPUs every action is waited for, so that its end is known; a recorded step is a little
    slower than others for that.

    Raises:
        InvalidInput: It is a pipeline within one process, whose stages do not run side by side.
    """
    if not hasattr(pipeline, "observe"):
        raise InvalidInput(
            f"a {type(pipeline).__name__} cannot be recorded: only stages in processes of their "
            "own run side by side; make a DistributedPipeline under torchrun"
        )
    found = Trace(pipeline)
    pipeline.observe(found.note)
    try:
        yield found
    finally:
        pipeline.observe(None)


def _ahead_of_rank_0(pipeline: DistributedPipeline) -> float:
    """How far this rank's clock is ahead, to about the time of a barrier."""
    readings = []
    for _ in range(CLOCK_READINGS):
        pipeline.barrier()
        mine = torch.tensor([time.perf_counter()], dtype=torch.float64, device=pipeline.device)
        first = mine.clone()
        dist.broadcast(first, group_src=0, group=pipeline.group)
        readings.append(float(mine - first))
    return statistics.median(readings)


def find_last_run(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Where all of ``wanted`` stands in ``names`` for the last time, in its order."""
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
