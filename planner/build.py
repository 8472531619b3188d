"""Write a priced split down as a plan."""

from __future__ import annotations

from itertools import pairwise

from ..core.errors import Infeasible, InvalidInput
from ..core.plan import Baseline, Plan, Proof, Stage
from .cost import StageCosts
from .objective import OBJECTIVE_NAMES
from .pipeline import ROUNDING
from .price import Priced, price
from .schedules import in_flight
from .splits import Cuts, check_cuts, equal_layers, even_times


def build_plan(costs: StageCosts, priced: Priced, lower_bound_s: float) -> Plan:
    """The plan of a split, with its proof and what other cuts would cost.

    Args:
        costs: What the split was priced with.
        priced: The split.
        lower_bound_s: No allowed split has a smaller objective.
    """
    profile, options, cuts = costs.profile, costs.options, priced.cuts
    bound_s = min(lower_bound_s, priced.objective_s)
    is_proven = priced.objective_s - bound_s <= ROUNDING * priced.objective_s
    return Plan(
        model=profile.model,
        spec=profile.spec,
        balance=tuple(last - first for first, last in pairwise(cuts)),
        stages=_stages(costs, cuts),
        boundaries=tuple(profile.boundaries[cut - 1] for cut in cuts[1:-1]),
        options=options,
        schedule=options.schedule,
        num_microbatches=options.num_microbatches,
        step_time_s=priced.step_time_s,
        bubble_fraction=priced.bubble_fraction,
        tied_sync_time_s=costs.tied_sync_s(cuts),
        proof=Proof(
            objective=OBJECTIVE_NAMES[options.schedule],
            value=priced.objective_s,
            lower_bound=bound_s,
            status="optimal" if is_proven else "feasible",
        ),
        baselines=_baselines(costs, len(cuts) - 1),
        profile_id=profile.content_id(),
        estimated=profile.provenance.source == "estimated",
        inputs=profile.inputs,
        input_structure=profile.input_structure,
        fixed_mode=profile.fixed_mode,
        notes=(*profile.notes, *_notes(costs)),
    )


def _stages(costs: StageCosts, cuts: Cuts) -> tuple[Stage, ...]:
    profile, options, num_stages = costs.profile, costs.options, len(cuts) - 1
    times = costs.stage_times(cuts)
    stages = []
    for index, (first, last) in enumerate(pairwise(cuts)):
        layers = [entry.layer for entry in profile.layers[first:last]]
        fqns = dict.fromkeys(fqn for layer in layers for fqn in layer.module_fqns)
        before = profile.boundaries[first - 1] if first else None
        after = profile.boundaries[last - 1] if index + 1 < num_stages else None
        held = in_flight(options.schedule, index, num_stages, options.num_microbatches)
        stages.append(
            Stage(
                first_layer=first,
                num_layers=last - first,
                layer_names=tuple(layer.name for layer in layers),
                module_fqns=tuple(fqns),
                devices=(costs.cluster.devices[index].name,),
                forward_time_s=times.forward_s[index],
                backward_time_s=times.backward_s[index],
                send_forward_bytes=after.forward_bytes if after else 0,
                send_backward_bytes=before.backward_bytes if before else 0,
                send_forward_time_s=times.send_forward_s[index] if after else 0.0,
                send_backward_time_s=times.send_backward_s[index - 1] if before else 0.0,
                memory=costs.memory(first, last, held),
                memory_limit_bytes=costs.limits_bytes[index],
                in_flight=held,
            )
        )  # fmt: skip
    return tuple(stages)


def _baselines(costs: StageCosts, num_stages: int) -> tuple[Baseline, ...]:
    """Other cuts into as many stages, priced alike; without a time where they cannot be used."""
    splits = {
        "equal_layers": equal_layers(costs.num_layers, num_stages),
        "balance_by_time": even_times(costs, num_stages),
    }
    baselines = []
    for name, cuts in splits.items():
        try:
            check_cuts(costs, cuts)
            step_time_s = price(costs, cuts).step_time_s
        except (Infeasible, InvalidInput):
            step_time_s = None
        counts = tuple(last - first for first, last in pairwise(cuts))
        baselines.append(Baseline(name=name, balance=counts, step_time_s=step_time_s))
    return tuple(baselines)


def _notes(costs: StageCosts) -> list[str]:
    """What the planner had to assume about the profile."""
    profile, notes = costs.profile, []
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
    return notes
