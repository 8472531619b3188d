"""The schedule a plan runs by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..core.plan.plan import Plan
from ..core.plan.schedule import Action, Schedule, Work
from .make_schedule import make_schedule

BACKWARDS = (Work.BACKWARD, Work.BACKWARD_INPUT)
"""What needs a micro-batch's activations first."""


def schedule_of(plan: Plan) -> Schedule:
    """What every rank does in one step of a plan, by the plan's own depths, replicas and chunks.

    The simulator's timeline and the executor both read this. Ranks are numbered place by place:
    all replicas of the first stage, then those of the second. Where a stage recomputes, ``R``
    stands right before the backward.

    Raises:
        InvalidInput: The plan's schedule does not take its numbers, or its depths would wait for
            each other for ever.
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
    modes = {
        index: stage.recompute for index, stage in enumerate(stages) if stage.recompute != "never"
    }
    if not modes:
        return schedule
    ranks = tuple(tuple(_recomputing(actions, modes)) for actions in schedule.ranks)
    return Schedule(
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        stage_ranks=schedule.stage_ranks,
        ranks=ranks,
    )


def _recomputing(actions: Sequence[Action], modes: Mapping[int, str]) -> Iterator[Action]:
    """One rank's actions, with ``R`` where a stage of these modes has to recompute."""
    last_forward = {
        action.stage: action.microbatch for action in actions if action.work is Work.FORWARD
    }
    for action in actions:
        mode = modes.get(action.stage)
        if mode and action.work in BACKWARDS:
            keeps = mode == "except_last" and action.microbatch == last_forward[action.stage]
            if not keeps:
                yield Action(stage=action.stage, work=Work.RECOMPUTE, microbatch=action.microbatch)
        yield action
