"""Build the view of a plan: everything a page, file or terminal shows of it."""

from __future__ import annotations

from ..core.cluster.cluster import Cluster
from ..core.errors import InvalidInput
from ..core.plan.assumptions import list_assumptions
from ..core.plan.plan import Plan, Stage
from ..core.plan.table import describe_error, format_proof
from ..core.profile.profile import Profile
from ..planner.problem.input_checks import scale_to_plan
from ..planner.simulator.plan_timeline import plan_rows
from ..planner.validation.validate import as_ordered
from ..schedules.layout import lay_out
from .graph import build_graph_view
from .lanes import build_boxes, build_lanes, build_memory_curves
from .layer_columns import LayerMemory, build_layer_columns
from .meshes import describe_mesh, time_collectives
from .plan_view import GraphView, Header, LayerColumns, PlanView, StageRow
from .reproduce import reproduce

MAX_ACTIONS = 200_000
"""Most actions in one drawing; a larger step is not drawn."""

NOT_SEARCHED = "cost computed for this split, not searched: faster cuts may exist"
"""Stands in place of the proof of a plan that was priced and not searched."""


def build_plan_view(
    plan: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    *,
    with_step: bool = True,
    with_layers: bool = True,
    searched: bool = True,
) -> PlanView:
    """Build everything there is to see of a plan.

    Without its profile, layers have only names; without its cluster, assumptions about links are
    left out. ``with_step`` simulates the step for boxes and curves; ``with_layers`` lists the
    layers' costs and folds them by module. Unless ``searched`` for, a plan's bound means nothing.
    """
    if profile is not None:
        profile = _of_plan(plan, profile)
    where = lay_out(plan)
    is_drawn = 2 * plan.num_microbatches * plan.num_stages <= MAX_ACTIONS
    step = plan_rows(plan) if with_step and is_drawn else None
    assumed = tuple(list_assumptions(profile, cluster)) if profile and cluster else ()
    held = LayerMemory(profile) if profile and with_layers else None
    notes = dict.fromkeys((*plan.notes, *(profile.notes if profile else ())))
    return PlanView(
        header=_header(plan, searched),
        balance=plan.balance,
        stages=tuple(map(_stage_row, plan.stages, time_collectives(plan, profile, cluster))),
        layers=build_layer_columns(plan, profile, held)
        if with_layers
        else LayerColumns(names=(), stages=()),
        lanes=build_lanes(plan, where, step),
        boxes=None if step is None else build_boxes(step),
        memory=build_memory_curves(plan, where, step),
        graph=build_graph_view(plan, profile, held) if with_layers else GraphView(),
        baselines=plan.baselines,
        proof=plan.proof,
        profile_id=plan.profile_id,
        provenance=None if profile is None else profile.provenance,
        assumptions=assumed,
        notes=tuple(note for note in notes if note not in assumed),
        reproduce=reproduce(plan, cluster),
    )


def _of_plan(plan: Plan, profile: Profile) -> Profile:
    """Return the profile at the plan's micro-batch size and in its layer order."""
    profile = as_ordered(plan, scale_to_plan(plan, profile))
    if plan.layer_names != tuple(entry.layer.name for entry in profile.layers):
        raise InvalidInput(
            f"the plan of {plan.model!r} has {len(plan.layer_names)} layers that are not the "
            f"{len(profile.layers)} of this profile of {profile.model!r}; give the profile it was "
            "made from",
            field="/profile",
        )
    return profile


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
        expected_error=describe_error(plan),
        proof=tuple(line.removeprefix("proof: ") for line in format_proof(plan))
        if searched
        else (NOT_SEARCHED,),
    )


def _fullest(plan: Plan) -> tuple[str, int, int | None]:
    """Return name, bytes and limit of the device nearest to its limit.

    Without limits it is the device that holds most.
    """
    limits = {name: stage.memory_limit_bytes for stage in plan.stages for name in stage.devices}
    # Devices may have different limits: the fullest is the one nearest to its own.
    held = plan.memory_by_device()

    def fullness(name: str) -> tuple[float, int]:
        limit = limits[name]
        return (held[name] / limit if limit else 0.0, held[name])

    name = max(held, key=fullness)
    return name, held[name], limits[name]


def _stage_row(stage: Stage, collectives_s: tuple[float, float] | None) -> StageRow:
    forward_s, backward_s = collectives_s or (None, None)
    return StageRow(
        devices=stage.devices,
        replicas=stage.replicas,
        tensor=stage.tensor,
        strategy=stage.strategy,
        mesh=describe_mesh(stage),
        collective_forward_s=forward_s,
        collective_backward_s=backward_s,
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
