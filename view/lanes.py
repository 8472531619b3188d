"""One lane per rank: boxes of its work and the curve of its memory."""

from __future__ import annotations

from collections import defaultdict

from ..core.plan.plan import Plan, Stage
from ..core.plan.schedule import Work
from ..planner.simulator.rows import HeldRow, StepRows
from ..schedules.layout import Layout
from .plan_view import Boxes, Lane, MemoryCurve

COMPUTATIONS = frozenset(map(str, Work))


def list_devices(plan: Plan, where: Layout, rank: int) -> tuple[str, ...]:
    """Return the names of the devices that split the layers of a rank, or of its only one."""
    stage = where.stages_of(rank)[0]
    return plan.stages[stage].devices_of(where.stage_ranks[stage].index(rank))


def name_device(plan: Plan, where: Layout, rank: int) -> str:
    """Return the name of the device a rank runs on; of several, the first and their number."""
    devices = list_devices(plan, where, rank)
    return devices[0] + f" +{len(devices) - 1}" * (len(devices) > 1)


def build_lanes(plan: Plan, where: Layout, step: StepRows | None) -> tuple[Lane, ...]:
    """Build one lane per rank."""
    busy_s = [0.0] * where.num_ranks
    for event in step.events if step is not None else ():
        if event.kind in COMPUTATIONS:  # a device that waits for a transfer is idle
            busy_s[event.rank] += event.end_s - event.start_s
    peaks = plan.memory_by_device()
    lanes = []
    for rank in range(where.num_ranks):
        stages, device = where.stages_of(rank), name_device(plan, where, rank)
        lanes.append(
            Lane(
                device=device,
                stages=stages,
                busy_s=busy_s[rank],
                memory_bytes=peaks[list_devices(plan, where, rank)[0]],
                memory_limit_bytes=plan.stages[stages[0]].memory_limit_bytes,
            )
        )
    return tuple(lanes)


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
        stages = [plan.stages[index] for index in where.stages_of(rank)]
        device = name_device(plan, where, rank)
        curves.append(
            MemoryCurve(
                device=device,
                fixed_bytes=sum(map(_fixed_bytes, stages)),
                limit_bytes=stages[0].memory_limit_bytes,
                time_s=tuple(change.time_s for change in held[rank]),
                held_bytes=tuple(change.held_bytes for change in held[rank]),
                peak_bytes=peaks[list_devices(plan, where, rank)[0]],
            )
        )
    return tuple(curves)


def _fixed_bytes(stage: Stage) -> int:
    """Sum what a stage holds throughout: all but activations and recomputed workspace."""
    memory = stage.memory
    counted = memory.activations_bytes
    if stage.recomputes_whole:
        counted += memory.workspace_bytes
    return memory.total_bytes - counted
