"""Check that a plan, or a schedule of the caller's own, can be run as it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..core.errors import PlanMismatch
from ..core.plan.plan import Plan
from ..core.plan.schedule import Schedule
from ..schedules.validate import validate

Where = Literal["processes", "devices", "one device"]
"""Where a plan is to run: in one process per device, in one process with a device per stage, or in
one process on at most one device."""


def check_runnable(plan: Plan, where: Where = "processes") -> None:
    """Raise `PlanMismatch` before anything runs if the plan cannot run as planned.

    ======================  =========  =======  ==========
    the plan has            processes  devices  one device
    ======================  =========  =======  ==========
    layers reordered        no         no       no
    replicas                yes        no       yes
    values sent straight    yes        relayed  relayed
    anything else           yes        yes      yes
    ======================  =========  =======  ==========

    The model is captured in its own order, so no other order can be run. Processes keep the plan's
    time and memory. A single process works in GPipe's order whatever the schedule, which changes
    neither outputs nor gradients. On a single device it may also ignore replicas, because nothing
    is placed; with a device per stage their devices would be left idle.

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


_WORDS: dict[Where, str] = {
    "processes": "in processes",
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


def _alternative(plan: Plan) -> str:
    if any(_obstacles(plan, "one device")):
        return ""
    return "; or run it in processes, or with stagewright.Pipeline on one device (same results)"
