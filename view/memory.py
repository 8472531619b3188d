"""Memory curves: bytes each device holds over a step."""

from __future__ import annotations

from collections import defaultdict

from ..core.plan.plan import Plan, Stage
from ..planner.simulator.rows import HeldRow, StepRows
from ..schedules.layout import Layout
from .gantt import list_stages, name_device
from .plan_view import MemoryCurve


def build_memory_curves(
    plan: Plan, where: Layout, step: StepRows | None
) -> tuple[MemoryCurve, ...]:
    """Build one memory curve per rank; without a step curves have no points."""
    held: dict[int, list[HeldRow]] = defaultdict(list)
    for change in step.held if step is not None else ():
        held[change.rank].append(change)
    peaks = plan.memory_by_device()
    curves = []
    for rank in range(where.num_ranks):
        stages = [plan.stages[index] for index in list_stages(where, rank)]
        device = name_device(plan, where, rank)
        curves.append(
            MemoryCurve(
                device=device,
                fixed_bytes=sum(map(_fixed_bytes, stages)),
                limit_bytes=stages[0].memory_limit_bytes,
                time_s=tuple(change.time_s for change in held[rank]),
                held_bytes=tuple(change.held_bytes for change in held[rank]),
                peak_bytes=peaks[device],
            )
        )
    return tuple(curves)


def _fixed_bytes(stage: Stage) -> int:
    """Sum what a stage holds throughout: all but activations and recomputed workspace."""
    memory = stage.memory
    counted = memory.activations_bytes
    if stage.recompute != "never":
        counted += memory.workspace_bytes
    return memory.total_bytes - counted
