"""Schedule of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..core.errors import PlanMismatch
from ..core.plan.plan import Plan
from ..core.plan.schedule import Action, Schedule, Work
from .make_schedule import make_schedule

BACKWARDS = (Work.BACKWARD, Work.BACKWARD_INPUT)
"""Work that needs a micro-batch's activations first."""


def schedule_of(plan: Plan) -> Schedule:
    """Return the actions of every rank in one step of a plan.

    The simulator's timeline and the executor both read this. Ranks are numbered place by place:
    all replicas of the first stage, then those of the second. On a stage that recomputes, ``R``
    stands right before the backward.

    Raises:
        InvalidInput: The schedule does not support the plan's numbers, or its depths deadlock.
    """
    stages = plan.stages
    schedule = make_schedule(
        plan.schedule,
        len(stages),
        plan.num_microbatches,
        replicas=[stage.replicas for stage in stages],
        depths=[stage.in_flight for stage in stages] if plan.schedule == "1f1b" else (),
        chunks=plan.chunks,
    )
    modes = {index: stage.recompute for index, stage in enumerate(stages) if stage.recomputes_whole}
    if not modes:
        return schedule
    ranks = tuple(tuple(_insert_recomputation(actions, modes)) for actions in schedule.ranks)
    return Schedule(
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        stage_ranks=schedule.stage_ranks,
        ranks=ranks,
    )


def count_sharing_ranks(plan: Plan, schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank of a schedule, how many devices share its work by tensor parallelism.

    Raises:
        PlanMismatch: Stages of one rank have different degrees.
    """
    found: dict[int, int] = {}
    for index, (stage, ranks) in enumerate(zip(plan.stages, schedule.stage_ranks, strict=True)):
        for rank in ranks:
            if found.setdefault(rank, stage.tensor) != stage.tensor:
                raise PlanMismatch(
                    f"stage {index} is split over {stage.tensor} devices, but another stage on the "
                    f"same devices over {found[rank]}; use one tensor degree for all stages of a "
                    "device"
                )
    return tuple(found[rank] for rank in range(len(schedule.ranks)))


def count_ranks(plan: Plan) -> int:
    """Return how many devices, or processes, a plan needs."""
    return sum(count_sharing_ranks(plan, schedule_of(plan)))


def _insert_recomputation(actions: Sequence[Action], modes: Mapping[int, str]) -> Iterator[Action]:
    last_forward = {
        action.stage: action.microbatch for action in actions if action.work is Work.FORWARD
    }
    for action in actions:
        mode = modes.get(action.stage)
        if mode and action.work in BACKWARDS:
            # After the last forward of a replica nothing else needs the memory of its activations.
            keeps = mode == "except_last" and action.microbatch == last_forward[action.stage]
            if not keeps:
                yield Action(stage=action.stage, work=Work.RECOMPUTE, microbatch=action.microbatch)
        yield action
