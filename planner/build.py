"""Write a decision down as a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..core.plan import Baseline, Plan, Proof, Stage
from .assignment import Assignment, counts_of
from .candidates import equal_layers, even_times
from .price import Priced
from .request import Request
from .search import ROUNDING
from .solve import Decision

OBJECTIVE_NAMES: dict[str, str] = {
    "1f1b": "1F1B model step time, sum + (n - 1) x slowest stage",
    "gpipe": "GPipe step time, sum + (n - 1) x (slowest forward + slowest backward)",
    "simulated": "simulated step time",
    "throughput": "seconds per micro-batch in steady state",
    "latency": "seconds for one micro-batch forward",
    "memory": "bytes of the largest device",
    "devices": "devices used",
    "balance_time": "time of the slowest stage",
    "balance_size": "bytes of the largest stage",
    "pipedream": "1F1B model step time of PipeDream's own optimum",
}


def build_plan(request: Request, decision: Decision) -> Plan:
    """The plan that was decided on, with its proof and what other cuts would cost."""
    order, given = decision.priced.assignment.order, request.profile
    notes = _notes(request)
    if order:
        request = request.in_order(order)
        assignment = replace(decision.priced.assignment, order=())
        decision = replace(decision, priced=request.pricer.price(assignment))
    priced, profile, options = decision.priced, request.profile, request.options
    pricer, cuts = request.pricer, priced.assignment.cuts
    bound = min(decision.lower_bound, priced.value)
    is_proven = priced.value - bound <= ROUNDING * priced.value
    return Plan(
        model=profile.model,
        spec=profile.spec,
        balance=counts_of(cuts),
        stages=_stages(request, priced),
        boundaries=tuple(profile.boundaries[cut - 1] for cut in cuts[1:-1]),
        options=options,
        schedule=pricer.schedule,
        num_microbatches=pricer.num_microbatches,
        chunks=priced.assignment.chunks,
        layer_order=order,
        step_time_s=priced.step_time_s,
        bubble_fraction=priced.bubble_fraction,
        tied_sync_time_s=priced.tied_sync_s,
        forward_channels=priced.forward_channels,
        backward_channels=priced.backward_channels,
        proof=Proof(
            objective=OBJECTIVE_NAMES[_name(request)],
            value=priced.value,
            lower_bound=bound,
            best_value=min(decision.best_value, priced.value),
            status="optimal" if is_proven else "feasible",
            simulated_lower_bound_s=min(decision.simulated_bound_s, priced.step_time_s),
        ),
        baselines=_baselines(request, priced.assignment),
        profile_id=given.content_id(),
        estimated=profile.provenance.source == "estimated",
        inputs=profile.inputs,
        input_structure=profile.input_structure,
        fixed_mode=profile.fixed_mode,
        notes=(*profile.notes, *notes),
    )


def _name(request: Request) -> str:
    objective, schedule = request.options.objective, request.options.schedule
    if objective != "step_time":
        return objective
    return schedule if schedule in OBJECTIVE_NAMES else "simulated"


def _stages(request: Request, priced: Priced) -> tuple[Stage, ...]:
    profile, chosen = request.profile, priced.assignment
    stages = []
    for number, (first, last) in enumerate(pairwise(chosen.cuts)):
        price = priced.stages[number]
        layers = [entry.layer for entry in profile.layers[first:last]]
        fqns = dict.fromkeys(fqn for layer in layers for fqn in layer.module_fqns)
        devices = chosen.device_indices(request.devices, number)
        stages.append(
            Stage(
                first_layer=first,
                num_layers=last - first,
                layer_names=tuple(layer.name for layer in layers),
                module_fqns=tuple(fqns),
                devices=tuple(request.cluster.devices[index].name for index in devices),
                forward_time_s=price.forward_s,
                backward_time_s=price.backward_s,
                send_forward_bytes=price.send_forward_bytes,
                send_backward_bytes=price.send_backward_bytes,
                send_forward_time_s=price.send_forward_s,
                send_backward_time_s=price.send_backward_s,
                sync_time_s=price.sync_s,
                memory=price.memory,
                memory_limit_bytes=price.limit_bytes,
                in_flight=price.in_flight,
                replicas=chosen.replicas[number],
                recompute="always" if chosen.recompute[number] else "never",
                strategy="replicate" if chosen.replicas[number] > 1 else "single",
            )
        )
    return tuple(stages)


def _baselines(request: Request, chosen: Assignment) -> tuple[Baseline, ...]:
    """Other cuts into as many stages on the same devices; without a time where unusable."""
    costs, pricer = request.costs, request.pricer
    cuts = {
        "equal_layers": equal_layers(len(request.profile.layers), chosen.num_stages),
        "balance_by_time": even_times(costs, chosen.num_stages),
    }
    baselines = []
    for name, entry in cuts.items():
        if entry is None:
            continue
        other = replace(chosen, cuts=entry)
        priced = pricer.priced_if_usable(other) if request.allows(other) else None
        baselines.append(
            Baseline(
                name=name,
                balance=counts_of(entry),
                step_time_s=priced.step_time_s if priced else None,
            )
        )
    return tuple(baselines)


def _notes(request: Request) -> list[str]:
    """What the planner had to assume about the profile."""
    profile, notes = request.profile, []
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
