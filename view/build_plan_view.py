"""From a plan to what is seen of it."""

from __future__ import annotations

from ..core.cluster.cluster import Cluster
from ..core.errors import InvalidInput
from ..core.plan.assumptions import assumptions
from ..core.plan.plan import Plan, Stage
from ..core.plan.table import proof_lines
from ..core.profile.profile import Profile
from ..planner.problem.arguments import as_planned
from ..planner.simulator.plan_timeline import plan_rows
from ..planner.validation.validate import as_ordered
from ..schedules.layout import Layout, make_layout
from .gantt import boxes_of, lanes_of
from .graph import graph_of
from .layer_memory import Held
from .layers import layers_of
from .memory import curves_of
from .plan_view import GraphView, Header, LayerColumns, PlanView, StageRow
from .reproduce import reproduce

MAX_ACTIONS = 200_000
"""Actions of all ranks in one drawing; more are left out of it."""

NOT_SEARCHED = "priced as it stands, not searched: there may be faster cuts for this"
"""What is said of a plan that was only priced, in the place of its proof."""


def plan_view(
    plan: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    *,
    with_step: bool = True,
    with_layers: bool = True,
    searched: bool = True,
) -> PlanView:
    """What there is to see of a plan.

    Args:
        plan: What is looked at.
        profile: The one it was made from; without, layers have names alone.
        cluster: What it was made for; without, nothing is said of links.
        with_step: Whether to simulate what the boxes and curves show; lanes are idle without.
        with_layers: Whether to say what the layers cost, and fold them by module.
        searched: Whether the plan was searched for; of one that was only priced, how far the best
            is from it says nothing.

    Raises:
        InvalidInput: The profile is another model's or in another order.
    """
    if profile is not None:
        profile = _of_plan(plan, profile)
    where = layout_of(plan)
    is_drawn = 2 * plan.num_microbatches * plan.num_stages <= MAX_ACTIONS
    step = plan_rows(plan) if with_step and is_drawn else None
    assumed = tuple(assumptions(profile, cluster)) if profile and cluster else ()
    held = Held(profile) if profile and with_layers else None
    notes = dict.fromkeys((*plan.notes, *(profile.notes if profile else ())))
    return PlanView(
        header=_header(plan, searched),
        balance=plan.balance,
        stages=tuple(map(_stage_row, plan.stages)),
        layers=layers_of(plan, profile, held) if with_layers else LayerColumns(names=(), stages=()),
        lanes=lanes_of(plan, where, step),
        boxes=None if step is None else boxes_of(step),
        memory=curves_of(plan, where, step),
        graph=graph_of(plan, profile, held) if with_layers else GraphView(),
        baselines=plan.baselines,
        proof=plan.proof,
        profile_id=plan.profile_id,
        provenance=None if profile is None else profile.provenance,
        assumptions=assumed,
        notes=tuple(note for note in notes if note not in assumed),
        reproduce=reproduce(plan, cluster),
    )


def _of_plan(plan: Plan, profile: Profile) -> Profile:
    """The profile at the plan's size of micro-batches and in its order."""
    profile = as_ordered(plan, as_planned(plan, profile))
    if plan.layer_names != tuple(entry.layer.name for entry in profile.layers):
        raise InvalidInput(
            f"the plan of {plan.model!r} has {len(plan.layer_names)} layers that are not the "
            f"{len(profile.layers)} of this profile of {profile.model!r}; give the profile it was "
            "made from",
            field="/profile",
        )
    return profile


def layout_of(plan: Plan) -> Layout:
    """Which rank of the plan's timeline holds what."""
    replicas = [stage.replicas for stage in plan.stages]
    return make_layout(plan.schedule, plan.num_microbatches, replicas, plan.chunks)


def _header(plan: Plan, searched: bool) -> Header:
    device, peak_bytes, limit_bytes = _fullest(plan)
    size = plan.microbatch_size
    equal = plan.baseline("equal_layers")
    equal_s = None if equal is None else equal.step_time_s
    return Header(
        model=plan.model,
        schedule=plan.schedule,
        objective=plan.options.objective,
        num_stages=plan.num_stages,
        num_devices=len(plan.memory_by_device()),
        num_microbatches=plan.num_microbatches,
        num_samples=size and size * plan.num_microbatches,
        step_time_s=plan.step_time_s,
        samples_per_s=plan.samples_per_s,
        bubble_fraction=plan.bubble_fraction,
        peak_memory_bytes=peak_bytes,
        peak_memory_limit_bytes=limit_bytes,
        peak_memory_device=device,
        equal_layers_step_time_s=equal_s,
        gain=equal_s / plan.step_time_s - 1 if equal_s and plan.step_time_s else None,
        estimated=plan.estimated,
        error_band=plan.error_band,
        proof=tuple(line.removeprefix("proof: ") for line in proof_lines(plan))
        if searched
        else (NOT_SEARCHED,),
    )


def _fullest(plan: Plan) -> tuple[str, int, int | None]:
    """The device nearest to its limit, or without limits, the fullest: name, bytes, limit."""
    limits = {name: stage.memory_limit_bytes for stage in plan.stages for name in stage.devices}
    held = plan.memory_by_device()

    def fullness(name: str) -> tuple[float, int]:
        limit = limits[name]
        return (held[name] / limit if limit else 0.0, held[name])

    name = max(held, key=fullness)
    return name, held[name], limits[name]


def _stage_row(stage: Stage) -> StageRow:
    return StageRow(
        devices=stage.devices,
        replicas=stage.replicas,
        first_layer=stage.first_layer,
        num_layers=stage.num_layers,
        first_name=stage.layer_names[0],
        last_name=stage.layer_names[-1],
        forward_time_s=stage.forward_time_s,
        backward_time_s=stage.backward_time_s,
        in_flight=stage.in_flight,
        recompute=stage.recompute,
        send_bytes=stage.send_forward_bytes + stage.send_backward_bytes,
        sync_time_s=stage.sync_time_s,
        memory=stage.memory,
        memory_bytes=stage.memory.total_bytes,
        memory_limit_bytes=stage.memory_limit_bytes,
    )
