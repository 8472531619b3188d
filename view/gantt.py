"""Gantt chart: one lane per rank, one box per action."""

from __future__ import annotations

from ..core.plan.plan import Plan
from ..core.plan.schedule import Work
from ..planner.simulator.rows import StepRows
from ..schedules.layout import Layout
from .plan_view import Boxes, Lane

COMPUTATIONS = frozenset(map(str, Work))


def list_stages(where: Layout, rank: int) -> tuple[int, ...]:
    """Return the stages a rank runs, in order."""
    return tuple(stage for stage, ranks in enumerate(where.stage_ranks) if rank in ranks)


def name_device(plan: Plan, where: Layout, rank: int) -> str:
    """Return the name of the device a rank runs on."""
    stage = list_stages(where, rank)[0]
    return plan.stages[stage].devices[where.stage_ranks[stage].index(rank)]


def build_lanes(plan: Plan, where: Layout, step: StepRows | None) -> tuple[Lane, ...]:
    """Build one lane per rank."""
    busy_s = [0.0] * where.num_ranks
    for event in step.events if step is not None else ():
        if event.kind in COMPUTATIONS:  # a device that waits for a transfer is idle
            busy_s[event.rank] += event.end_s - event.start_s
    return tuple(
        Lane(
            device=name_device(plan, where, rank),
            stages=list_stages(where, rank),
            busy_s=busy_s[rank],
        )
        for rank in range(where.num_ranks)
    )


def build_boxes(step: StepRows) -> Boxes:
    """Transpose a step's events into columns."""
    ranks, stages, kinds, microbatches, start_s, end_s = zip(*step.events, strict=True)
    return Boxes(
        ranks=ranks,
        stages=stages,
        kinds=kinds,
        microbatches=microbatches,
        start_s=start_s,
        end_s=end_s,
    )
