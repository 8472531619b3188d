"""Schedule of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    modes = {
        index: stage.recompute for index, stage in enumerate(stages) if stage.recompute != "never"
    }
    if not modes:
        return schedule
    ranks = tuple(tuple(_insert_recomputation(actions, modes)) for actions in schedule.ranks)
    return Schedule(
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        stage_ranks=schedule.stage_ranks,
        ranks=ranks,
    )


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
