"""Assembly of the plan document from a solver's decision."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

from ..core.cluster.reserves import ReservedMemory
from ..core.plan.assumptions import list_assumptions, note_pipelines
from ..core.plan.plan import ROUNDING, Baseline, Objective, Plan, Proof, Sharing, Stage
from ..core.profile.backward_parts import describe_assumed
from ..core.profile.module_chain import find_chain_break
from ..core.units import format_time
from ..schedules.traits import SPLIT_BACKWARD
from .cost.assignment import Assignment, count_layers
from .cost.device_classes import reserved_memory
from .cost.plan_cost import CostedPlan, Decision, StageCost
from .cost.sharing import choose_sharing
from .heuristics.candidates import list_baselines, list_slots, rejection_reason
from .problem.input_checks import option_notes
from .problem.problem import PlanningRequest
from .problem.training_options import bytes_per_parameter

CUT_SHORT = "the search was cut short by its deadline: with more time there may be a better plan"

UNHURRIED = 0.5
"""Share of the time allowed; a search that took less was not affected by its deadline."""

MAX_NAMED = 4
"""Idle devices that a note names."""

OBJECTIVE_NAMES: dict[Objective, str] = {
    "step_time": "simulated step time",
    "throughput": "seconds per micro-batch in steady state",
    "latency": "seconds for one micro-batch forward",
    "memory": "bytes of the largest device",
    "devices": "devices used",
    "balance_time": "time of the slowest stage",
    "balance_size": "bytes of the largest stage",
    "pipedream": "1F1B model step time of PipeDream's own optimum",
}


def build_plan(request: PlanningRequest, decision: Decision, profile_id: str | None = None) -> Plan:
    """Return the plan of a decision, with its proof, baselines and notes.

    Computing the profile's id takes longer than evaluating a small plan: give it if it is known.
    """
    costed, given = decision.costed, request.profile
    notes = [*_notes(request, decision), *list_assumptions(request.profile, request.cluster)]
    if (band := given.provenance.error_band) is not None and len(costed.stages) > 1:
        notes.append(note_pipelines(band))
    if order := costed.assignment.order:
        request = request.reorder_profile(order)
        costed = request.cost_model.evaluate(replace(costed.assignment, order=()))
    profile, options = request.profile, request.options
    cost_model, cuts = request.cost_model, costed.assignment.cuts
    made = Plan(
        model=profile.model,
        spec=profile.spec,
        balance=count_layers(cuts),
        stages=_stages(request, costed),
        boundaries=tuple(profile.boundaries[cut - 1] for cut in cuts[1:-1]),
        options=options,
        schedule=cost_model.schedule,
        num_microbatches=cost_model.num_microbatches,
        chunks=costed.assignment.chunks,
        layer_order=order,
        step_time_s=costed.step_time_s,
        bubble_fraction=costed.bubble_fraction,
        tied_sync_time_s=costed.tied_sync_s,
        forward_channels=costed.forward_channels,
        backward_channels=costed.backward_channels,
        direct_sends=costed.direct_sends,
        proof=Proof(
            objective=OBJECTIVE_NAMES[options.objective],
            value=request.cost(costed),
            lower_bound=0.0,
            status="feasible",
        ),
        baselines=tuple(
            _build_baseline(request, name, other, costed.assignment)
            for name, other in list_baselines(request, costed.assignment)
        ),
        profile_id=profile_id or given.content_id(),
        bytes_per_parameter=bytes_per_parameter(profile, options),
        estimated=profile.provenance.source == "estimated",
        error_band=profile.provenance.error_band,
        inputs=profile.inputs,
        input_structure=profile.input_structure,
        fixed_mode=profile.fixed_mode,
        chain_break=find_chain_break(given),
        shared_weights=tuple(
            entry
            for entry in profile.parameters
            if entry.kind == "parameter" and len(entry.layers) > 1
        ),
        notes=(
            *profile.notes,
            *notes,
            *_sent(request, costed, is_reordered=bool(order)),
            *_idle(request, costed.assignment),
        ),
    ).with_bounds(decision.lower_bound, decision.simulated_bound_s)
    return made.locate(request.cluster)


def build_early(
    request: PlanningRequest, costed: CostedPlan, profile_id: str | None = None
) -> Plan:
    """Return the plan of a search that goes on, with the note of one that was cut short."""
    return build_plan(request, Decision(costed, 0.0, 0.0, notes=(CUT_SHORT,)), profile_id)


def was_cut_short(plan: Plan) -> bool:
    """Return True if the deadline cut the plan's search short."""
    return CUT_SHORT in plan.notes


def _stages(request: PlanningRequest, costed: CostedPlan) -> tuple[Stage, ...]:
    profile, chosen = request.profile, costed.assignment
    devices = _devices(request, chosen)
    is_typed = any(entry.layer.module_type for entry in profile.layers)
    stages = []
    for number, (first, last) in enumerate(pairwise(chosen.cuts)):
        price = costed.stages[number]
        layers = [entry.layer for entry in profile.layers[first:last]]
        fqns = dict.fromkeys(fqn for layer in layers for fqn in layer.module_fqns)
        stages.append(
            Stage(
                first_layer=first,
                num_layers=last - first,
                layer_names=tuple(layer.name for layer in layers),
                layer_types=tuple(layer.module_type for layer in layers) if is_typed else (),
                module_fqns=tuple(fqns),
                devices=devices[number],
                forward_time_s=price.forward_s,
                backward_time_s=price.backward_s,
                backward_input_time_s=price.backward_input_s,
                send_forward_bytes=price.send_forward_bytes,
                send_backward_bytes=price.send_backward_bytes,
                send_forward_time_s=price.send_forward_s,
                send_backward_time_s=price.send_backward_s,
                sync_time_s=price.sync_s,
                memory=price.memory,
                memory_limit_bytes=price.limit_bytes,
                reserved=_reserved(request, chosen, number),
                in_flight=price.in_flight,
                replicas=chosen.replicas[number],
                recompute="always" if chosen.recompute[number] else "never",
                strategy=_strategy(request, price, chosen.replicas[number]),
            )
        )
    return tuple(stages)


def _strategy(
    request: PlanningRequest, cost: StageCost, replicas: int
) -> Literal["single"] | Sharing:
    if replicas == 1:
        return "single"
    return choose_sharing(request.options) if cost.is_shared else "replicate"


def _reserved(request: PlanningRequest, chosen: Assignment, number: int) -> ReservedMemory:
    index = chosen.device_indices(request.devices, number)[0]
    return reserved_memory(request.cluster.devices[index].memory_bytes, request.options)


def _build_baseline(
    request: PlanningRequest, name: str, other: Assignment, chosen: Assignment
) -> Baseline:
    """Without a time where it is unusable."""
    reason = rejection_reason(request, other)
    step_s = None if reason else request.cost_model.evaluate(other).step_time_s
    devices = _devices(request, other)
    return Baseline(
        name=name,
        balance=count_layers(other.cuts),
        devices=() if devices == _devices(request, chosen) else devices,
        step_time_s=step_s,
        reason=reason,
    )


def _devices(request: PlanningRequest, chosen: Assignment) -> tuple[tuple[str, ...], ...]:
    """Return the names of each stage's devices."""
    devices = request.cluster.devices
    return tuple(
        tuple(devices[index].name for index in chosen.device_indices(request.devices, number))
        for number in range(chosen.num_stages)
    )


def _idle(request: PlanningRequest, chosen: Assignment) -> list[str]:
    """Return a note on devices that the plan does not use."""
    used = {index for index, _, _ in list_slots(request.devices, chosen)}
    devices = request.cluster.devices
    idle = [index for index in range(len(devices)) if index not in used]
    if not idle:
        return []
    names = ", ".join(devices[index].name for index in idle[:MAX_NAMED])
    rest = f" and {len(idle) - MAX_NAMED} more" if len(idle) > MAX_NAMED else ""
    between = 0
    for entry in request.devices.classes:
        taken = [index for index in entry.devices if index in used]
        if taken:
            between += sum(taken[0] < index < taken[-1] for index in set(entry.devices) - used)
    gaps = (
        f"; {between} of them lie{'s' * (between == 1)} between used ones, as a stage lies inside "
        "one group of devices or is made of whole ones"
    )
    what = "devices"
    if request.options.tensor != 1:
        what = f"groups of {request.options.tensor} devices"
    copies = "; max_replicas=None lets stages be copied to several devices"
    return [
        f"{len(idle)} of {len(devices)} {what} stay{'s' * (len(idle) == 1)} idle: {names}{rest}"
        + gaps * bool(between)
        + copies * (request.options.max_replicas == 1)
    ]


def _sent(request: PlanningRequest, costed: CostedPlan, *, is_reordered: bool) -> list[str]:
    """Return a note on relays or direct sends if the options allow both."""
    if request.options.skips == "relay":
        return []
    if is_reordered:
        return ["layers are reordered: all values are relayed"]
    if not request.cost_model.knows_readers:
        return ["the profile does not know which layer reads what: all values are relayed"]
    if costed.other_step_s is None:
        return ["no stage reads what another than the one in front of it has: nothing is relayed"]
    other = format_time(costed.other_step_s)
    if not costed.direct_sends:
        return [f"values are relayed: sent past stages, the step would be {other}"]
    return [f"values go past stages that have no use for them: relayed, the step would be {other}"]


def _notes(request: PlanningRequest, decision: Decision) -> list[str]:
    """Return notes on what the planner assumed about the profile and searched."""
    profile, notes = request.profile, [*option_notes(request.options), *decision.notes]
    notes += [request.state_note] if request.state_note else []
    if request.cost_model.schedule in SPLIT_BACKWARD:
        assumed = describe_assumed(profile)
        notes += [assumed] if assumed else []
    if not profile.parameters and any(entry.layer.parameter_bytes for entry in profile.layers):
        notes.append(
            "the profile lists no parameters: each layer's parameter_bytes count as trainable "
            "fp32 weights of its own"
        )
    if not profile.storages and any(entry.saved_activation_bytes for entry in profile.layers):
        notes.append(
            "the profile lists no storages: saved activations are summed over layers, which may "
            "count shared ones twice"
        )
    if request.options.layer_order == "any" and not profile.edges:
        notes.append("the profile does not know which layer reads what: its order was kept")
    gap = max(request.options.gap, ROUNDING)
    if decision.search_gap > gap and request.spent_share > UNHURRIED:
        notes.append(CUT_SHORT)
    if decision.is_whole:
        return notes
    if request.order_free is not None:
        notes.append(
            "the model has too many orders to search them all: a few were, the lower bound holds "
            "for every one"
        )
    elif not request.is_whole:
        notes.append(
            f"{len(request.positions) - 1} layers were planned in "
            f"{request.costs.num_atoms} groups of about equal work"
        )
    return notes
