"""Lanes and boxes: who does what when."""

from __future__ import annotations

from ..core.plan.plan import Plan
from ..core.plan.schedule import Work
from ..planner.simulator.rows import StepRows
from ..schedules.layout import Layout
from .plan_view import Boxes, Lane

COMPUTATIONS = frozenset(map(str, Work))


def stages_of(where: Layout, rank: int) -> tuple[int, ...]:
    """The stages a rank holds, in order."""
    return tuple(stage for stage, ranks in enumerate(where.stage_ranks) if rank in ranks)


def device_of(plan: Plan, where: Layout, rank: int) -> str:
    """The name of the device a rank runs on."""
    stage = stages_of(where, rank)[0]
    return plan.stages[stage].devices[where.stage_ranks[stage].index(rank)]


def lanes_of(plan: Plan, where: Layout, step: StepRows | None) -> tuple[Lane, ...]:
    """One lane a rank."""
    busy_s = [0.0] * where.num_ranks
    for event in step.events if step is not None else ():
        if event.kind in COMPUTATIONS:
            busy_s[event.rank] += event.end_s - event.start_s
    return tuple(
        Lane(
            device=device_of(plan, where, rank),
            stages=stages_of(where, rank),
            busy_s=busy_s[rank],
        )
        for rank in range(where.num_ranks)
    )


def boxes_of(step: StepRows) -> Boxes:
    """A step's events, field by field."""
    ranks, stages, kinds, microbatches, start_s, end_s = zip(*step.events, strict=True)
    return Boxes(
        ranks=ranks,
        stages=stages,
        kinds=kinds,
        microbatches=microbatches,
        start_s=start_s,
        end_s=end_s,
    )
