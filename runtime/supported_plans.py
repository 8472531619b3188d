"""Which plans the runtime runs as they were planned, and what to ask for instead of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from ..core.errors import InvalidInput, PlanMismatch
from ..core.plan.plan import Plan
from ..core.plan.schedule import Schedule
from ..schedules.validate import validate
from .batchnorm.running_statistics import BatchStatistics, checked_policy

TORCH_SCHEDULES = ("gpipe", "1f1b")
"""Schedules that torch's engine is asked to run."""

Where = Literal["processes", "torch's processes", "devices", "one device"]
"""What a plan is to be run on: a process a device, the same by torch's engine, one process with a
device a stage, or one process and no more than one device."""


def check_runnable(plan: Plan, where: Where = "processes") -> None:
    """Refuse what would run otherwise than planned, before anything runs.

    What each place takes:

    ======================  =========  =================  =======  ==========
    the plan has            processes  torch's processes  devices  one device
    ======================  =========  =================  =======  ==========
    layers reordered        no         no                 no       no
    replicas                yes        no                 no       yes
    recomputation           yes        no                 yes      yes
    several stages a rank   yes        no                 yes      yes
    schedules beyond two    yes        no                 yes      yes
    1f1b run ahead further  yes        no                 yes      yes
    values sent straight    yes        no                 relayed  relayed
    ======================  =========  =================  =======  ==========

    The model is captured in its own order, so no place runs another. Processes keep the plan's
    promises of time and memory, or refuse. One process works in GPipe's order whatever the plan
    says, so it takes every schedule: outputs and gradients are the same. On one device there is
    nothing to place, so replicas, which change no number either, are passed over; with a device a
    stage they would be missed.

    Raises:
        PlanMismatch: Naming all that cannot be run, and the options to plan with instead.
    """
    found = list(_obstacles(plan, where))
    if not found:
        return
    uses = "; ".join(use for use, _ in found)
    ways_out = dict.fromkeys(way_out for _, way_out in found)
    raise PlanMismatch(
        f"this plan cannot be run {_WORDS[where]}: {uses}. "
        f"Plan again with {' '.join(ways_out)}{_elsewhere(plan, where)}"
    )


def check_schedule(schedule: Schedule, plan: Plan) -> None:
    """See that a schedule of the caller's own can be run for this plan.

    Raises:
        InvalidInput: It can never finish.
        PlanMismatch: It is for another number of stages or micro-batches.
    """
    validate(schedule)
    theirs = (schedule.num_stages, schedule.num_microbatches)
    wanted = (plan.num_stages, plan.num_microbatches)
    if theirs != wanted:
        raise PlanMismatch(
            f"the schedule has {theirs[0]} stages and {theirs[1]} micro-batches, the plan "
            f"{wanted[0]} and {wanted[1]}; write it for the plan's"
        )


_WORDS: dict[Where, str] = {
    "processes": "in processes",
    "torch's processes": "by torch's engine",
    "devices": "on several devices by one process",
    "one device": "by one process",
}


def _obstacles(plan: Plan, where: Where) -> Iterator[tuple[str, str]]:
    """What cannot be run, and the option of ``stagewright plan`` that avoids it."""
    if plan.layer_order and plan.layer_order != tuple(range(len(plan.layer_order))):
        yield "its layers are reordered, a model is cut in its own order", "--order given"
    if where in ("one device", "processes"):
        return
    replicated = [index for index, stage in enumerate(plan.stages) if stage.replicas > 1]
    if replicated:
        counts = "-".join(str(stage.replicas) for stage in plan.stages)
        yield f"its stages have {counts} replicas, only one each is run", "--max-replicas 1"
    if where == "torch's processes":
        yield from _schedule_obstacles(plan)


def _schedule_obstacles(plan: Plan) -> Iterator[tuple[str, str]]:
    recomputed = [index for index, stage in enumerate(plan.stages) if stage.recompute != "never"]
    if recomputed:
        yield f"{_stages(recomputed)} recomputed, which is not done there", "--recompute never"
    if plan.schedule not in TORCH_SCHEDULES:
        yield (
            f"its schedule is {plan.schedule}, only {' and '.join(TORCH_SCHEDULES)} are run",
            "--schedule 1f1b",
        )
    if plan.direct_sends:
        yield "it sends values past stages, there they are relayed", "--skips relay"
    if plan.chunks > 1:
        yield f"it puts {plan.chunks} stages on a device, only one is run", "--schedule 1f1b"
    if plan.schedule == "1f1b" and plan.num_microbatches < plan.num_stages:
        yield (
            f"torch's 1F1B needs a micro-batch a stage, {plan.num_stages}, and it has "
            f"{plan.num_microbatches}",
            "--schedule gpipe",
        )
    if plan.schedule == "1f1b" and all(stage.replicas == 1 for stage in plan.stages):
        yield from _depth_obstacles(plan)


def _depth_obstacles(plan: Plan) -> Iterator[tuple[str, str]]:
    """Forwards ahead of what torch's ``Schedule1F1B`` does: it would run, slower than planned."""
    for index, stage in enumerate(plan.stages):
        own = min(plan.num_microbatches, plan.num_stages - index)
        if stage.in_flight > own:
            yield (
                f"stage {index} is planned to have {stage.in_flight} micro-batches in flight, "
                f"torch's 1F1B has {own} there and would be slower than planned",
                "--extra-in-flight 0",
            )
            return


def _stages(indices: list[int]) -> str:
    """For example ``stage 1 is`` or ``stages 0, 2 are``."""
    if len(indices) == 1:
        return f"stage {indices[0]} is"
    return f"stages {', '.join(map(str, indices))} are"


def _elsewhere(plan: Plan, where: Where) -> str:
    """The other way out, where there is one."""
    if next(_obstacles(plan, "one device"), None):
        return ""
    if where == "torch's processes":
        return "; the engine of Stagewright runs it as it is"
    return (
        "; in processes it runs as it is, and stagewright.Pipeline on one device computes the same"
    )


Engine = Literal["stagewright", "torch"]


def check_engine(
    engine: Engine, *, keyed_dropout: int | None, batch_statistics: BatchStatistics
) -> None:
    """Refuse what an engine would pass over.

    Raises:
        InvalidInput: There is no such engine or policy, or torch's schedules have no place for it.
    """
    if engine not in get_args(Engine):
        raise InvalidInput(f"engine is {engine!r}; give one of {', '.join(get_args(Engine))}")
    checked_policy(batch_statistics)
    ignored = {
        "keyed_dropout": keyed_dropout is not None,
        "batch_statistics": batch_statistics != "microbatch",
    }
    found = [name for name, is_asked_for in ignored.items() if is_asked_for]
    if engine == "torch" and found:
        raise InvalidInput(
            f"torch's schedules take no {' and no '.join(found)}; use engine='stagewright'"
        )
