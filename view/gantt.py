"""Lanes and boxes: who does what when."""

from __future__ import annotations

from ..core.plan import Plan
from ..core.schedule import Work
from ..core.timeline import Timeline
from ..schedules.layout import Layout
from .plan_view import Boxes, Lane


def stages_of(where: Layout, rank: int) -> tuple[int, ...]:
    """The stages a rank holds, in order."""
    return tuple(stage for stage, ranks in enumerate(where.stage_ranks) if rank in ranks)


def device_of(plan: Plan, where: Layout, rank: int) -> str:
    """The name of the device a rank runs on."""
    stage = stages_of(where, rank)[0]
    return plan.stages[stage].devices[where.stage_ranks[stage].index(rank)]


def lanes_of(plan: Plan, where: Layout, timeline: Timeline | None) -> tuple[Lane, ...]:
    """One lane a rank."""
    busy_s = [0.0] * where.num_ranks
    for event in timeline.events if timeline is not None else ():
        if isinstance(event.kind, Work):
            busy_s[event.rank] += event.end_s - event.start_s
    return tuple(
        Lane(
            device=device_of(plan, where, rank),
            stages=stages_of(where, rank),
            busy_s=busy_s[rank],
        )
        for rank in range(where.num_ranks)
    )


def boxes_of(timeline: Timeline) -> Boxes:
    """A timeline's events, field by field."""
    events = timeline.events
    return Boxes(
        ranks=tuple(event.rank for event in events),
        stages=tuple(event.stage for event in events),
        kinds=tuple(str(event.kind) for event in events),
        microbatches=tuple(event.microbatch for event in events),
        start_s=tuple(event.start_s for event in events),
        end_s=tuple(event.end_s for event in events),
    )
