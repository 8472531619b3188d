"""Check that a plan, or a schedule of the caller's own, can be run as it is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from ..core.errors import PlanMismatch
from ..core.graph.graph import Layer
from ..core.plan.plan import Plan
from ..core.plan.schedule import Schedule, Work
from ..schedules.validate import validate

Where = Literal["processes", "whole layers", "devices", "one device"]
"""Where a plan is to run: in one process per device, likewise by what does not split layers, in one
process with a device per stage, or in one process on at most one device."""


def check_runnable(plan: Plan, where: Where = "processes") -> None:
    """Raise `PlanMismatch` before anything runs if the plan cannot run as planned.

    ======================  =========  ============  =======  ==========
    the plan has            processes  whole layers  devices  one device
    ======================  =========  ============  =======  ==========
    layers reordered        no         no            no       no
    replicas                yes        yes           no       yes
    tensor parallelism      yes        no            no       yes
    values sent straight    yes        yes           relayed  relayed
    anything else           yes        yes           yes      yes
    ======================  =========  ============  =======  ==========

    The model is captured in its own order, so no other order can be run. Processes keep the plan's
    time and memory. A single process works in GPipe's order whatever the schedule, which changes
    neither outputs nor gradients. On a single device it may also ignore replicas and run layers
    unsplit, because nothing is placed; with a device per stage the others would be left idle.

    Raises:
        PlanMismatch: The message lists every obstacle and the options that avoid it.
    """
    obstacles = list(_obstacles(plan, where))
    if not obstacles:
        return
    reasons = "; ".join(reason for reason, _ in obstacles)
    remedies = " ".join(dict.fromkeys(option for _, option in obstacles))
    raise PlanMismatch(
        f"this plan cannot be run {_WORDS[where]}: {reasons}. Plan again with {remedies}"
        f"{_alternative(plan)}"
    )


def check_schedule(schedule: Schedule, plan: Plan) -> None:
    """Check that a schedule of the caller's own finishes and is for this plan."""
    validate(schedule)
    found = (schedule.num_stages, schedule.num_microbatches)
    expected = (plan.num_stages, plan.num_microbatches)
    if found != expected:
        raise PlanMismatch(
            f"the schedule has {found[0]} stages and {found[1]} micro-batches, the plan "
            f"{expected[0]} and {expected[1]}; write the schedule for the plan's numbers"
        )


def check_stateful_layers(
    layers: Sequence[Layer],
    plan: Plan,
    schedule: Schedule | None = None,
    *,
    recomputed: Collection[int] = (),
) -> None:
    """Check that each layer that keeps state sees all micro-batches, each once and in order.

    ``layers`` are those of the model as captured here. A single process has no schedule and no
    replicas; ``recomputed`` are its stages that are recomputed.

    Raises:
        PlanMismatch: A stage with such a layer has replicas, or runs a forward twice or in another
            order.
    """
    twice = {at for stage in plan.stages for span in stage.checkpoints for at in range(*span)}
    for layer, stage in _find_stateful(layers, plan):
        replicas = schedule.stage_ranks[stage] if schedule is not None else (0,)
        actions = schedule.ranks[replicas[0]] if schedule is not None else ()
        forwards = [a.microbatch for a in actions if a.stage == stage and a.work is Work.FORWARD]
        if len(replicas) > 1:
            problem = _replicated(stage, len(replicas))
        elif layers.index(layer) in twice:
            problem = "the plan recomputes it, which would change the state once more"
        elif stage in recomputed or any(
            a.stage == stage and a.work is Work.RECOMPUTE for a in actions
        ):
            problem = f"its stage {stage} is recomputed, which would change the state once more"
        elif forwards != sorted(forwards):
            problem = f"its stage {stage} takes micro-batches in the order {forwards}"
        else:
            continue
        raise _state_error(layer, problem)


def check_stateful_replicas(layers: Sequence[Layer], plan: Plan, replicas: Sequence[int]) -> None:
    """Check that each layer that keeps state is in a stage of one replica, to predict with.

    ``layers`` are those of the model as captured here, ``replicas`` the number for each stage.

    Raises:
        PlanMismatch: A stage with such a layer has replicas.
    """
    for layer, stage in _find_stateful(layers, plan):
        if replicas[stage] > 1:
            raise _state_error(layer, _replicated(stage, replicas[stage]))


def _find_stateful(layers: Sequence[Layer], plan: Plan) -> Iterator[tuple[Layer, int]]:
    """Return the layers that keep state from call to call, each with its stage."""
    stage_of = [stage for stage, count in enumerate(plan.balance) for _ in range(count)]
    return (pair for pair in zip(layers, stage_of, strict=True) if pair[0].stateful)


def _replicated(stage: int, count: int) -> str:
    return f"its stage {stage} has {count} replicas, each with its own state"


def _state_error(layer: Layer, problem: str) -> PlanMismatch:
    return PlanMismatch(
        f"layer {layer.name!r} changes {layer.stateful!r} in every call and keeps it, but "
        f"{problem}; plan with max_replicas=1 and recompute='never', or keep that state out of "
        "the model"
    )


_WORDS: dict[Where, str] = {
    "processes": "in processes",
    "whole layers": "where every layer runs whole",
    "devices": "on several devices by one process",
    "one device": "by one process",
}


def _obstacles(plan: Plan, where: Where) -> Iterator[tuple[str, str]]:
    """Yield each reason not to run the plan, with the planning option that avoids it."""
    if plan.layer_order and plan.layer_order != tuple(range(len(plan.layer_order))):
        yield "its layers are reordered, but a model is cut in its own order", "--order given"
    if where == "devices" and any(stage.replicas > 1 for stage in plan.stages):
        counts = "-".join(str(stage.replicas) for stage in plan.stages)
        yield (
            f"its stages have {counts} replicas, but one process runs one of each",
            "--max-replicas 1",
        )
    split = [index for index, stage in enumerate(plan.stages) if stage.tensor > 1]
    if where in ("whole layers", "devices") and split:
        yield (
            f"stage {split[0]} splits its layers over {plan.stages[split[0]].tensor} devices, "
            "which only training in processes does",
            "--tensor 1",
        )


def _alternative(plan: Plan) -> str:
    if any(_obstacles(plan, "one device")):
        return ""
    return "; or run it in processes, or with stagewright.Pipeline on one device (same results)"
