"""Plans by simple rules: candidates that compete with those of the exact search, and baselines.

Baselines are printed beside a plan, on its own devices; the plan is not slower than any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.units import format_bytes
from ..cost.assignment import (
    Assignment,
    Cuts,
    list_in_device_order,
    place_in_device_order,
    place_stages,
    to_cuts,
)
from ..cost.chain import ChainCosts
from ..cost.device_classes import Devices
from ..cost.plan_cost import CostedPlan, CostModel
from ..problem.problem import PlanningRequest
from .chain_partition import balance

FORBIDDEN = "the options forbid it"
"""Reason of a baseline that options rule out."""

MAX_GRIDS = 12
"""Uniform grids tried, those of the best closed form; all of them if there are few."""


def equal_layers(num_layers: int, num_stages: int) -> Cuts:
    """Return cuts whose layer counts differ by at most one, the larger ones in front."""
    each, more = divmod(num_layers, num_stages)
    return to_cuts([each + (stage < more) for stage in range(num_stages)])


def even_times(costs: ChainCosts, num_stages: int) -> Cuts | None:
    """Return the cuts with the fastest slowest stage, ignoring communication and memory."""
    if num_stages > costs.num_atoms:
        return None
    if num_stages in costs.even_cuts:
        return costs.even_cuts[num_stages]
    work = costs.forward_s + costs.backward_s
    atoms = [float(work[index, index + 1]) for index in range(costs.num_atoms)]
    blocks = to_cuts(balance(atoms, num_stages))
    costs.even_cuts[num_stages] = tuple(costs.positions[block] for block in blocks)
    return costs.even_cuts[num_stages]


def stage_counts(cost_model: CostModel) -> range:
    """Return the numbers of stages that devices, cuts and options allow."""
    options, costs = cost_model.options, cost_model.costs
    most = min(costs.num_atoms, len(cost_model.devices.cluster.devices))
    if options.max_stages is not None:
        most = min(most, options.max_stages)
    if options.num_stages is not None:
        most = min(most, options.num_stages)
        return range(options.num_stages, most + 1)
    return range(1, most + 1)


def uniform_grids(cost_model: CostModel) -> Iterator[Assignment]:
    """Yield plans with equal replicas for all stages, cut by even times and by counts."""
    for num_stages, replicas in _promising(cost_model):
        cuts = {equal_layers(len(cost_model.costs.profile.layers), num_stages)}
        if even := even_times(cost_model.costs, num_stages):
            cuts.add(even)
        for entry in sorted(cuts):
            if cost_model.costs.has(entry):
                yield from _on_devices(cost_model, entry, [replicas] * num_stages)


def _promising(cost_model: CostModel) -> list[tuple[int, int]]:
    """Return numbers of stages and replicas, those of the shortest ideal 1F1B step first."""
    options, costs = cost_model.options, cost_model.costs
    total = len(cost_model.devices.cluster.devices)
    work_s = float(costs.forward_s[0, -1] + costs.backward_s[0, -1])
    m = cost_model.num_microbatches
    most = 1 if cost_model.only_forward else min(options.max_replicas or total, m)
    scored = []
    for num_stages in stage_counts(cost_model):
        counts = {min(most, total // num_stages), 1}
        if total <= 2 * MAX_GRIDS:
            counts |= set(range(1, min(most, total // num_stages) + 1))
        for count in counts:
            share = -(-m // count)
            scored.append((work_s + (share - 1) * work_s / num_stages, num_stages, count))
    scored.sort()
    few = len(scored) <= 6 * MAX_GRIDS
    return [(stages, count) for _, stages, count in (scored if few else scored[:MAX_GRIDS])]


def _on_devices(cost_model: CostModel, cuts: Cuts, replicas: Sequence[int]) -> Iterator[Assignment]:
    """Yield placements on each class of devices, and in cluster order with one device per stage."""
    devices = cost_model.devices
    for number in range(min(len(devices.classes), 4)):
        found = place_stages(cuts, replicas, devices, classes=[number] * len(replicas))
        if found is not None:
            yield apply_recompute(cost_model, found)
    if max(replicas) == 1:
        found = place_in_device_order(cuts, devices)
        if found is not None:
            yield apply_recompute(cost_model, found)


def apply_recompute(cost_model: CostModel, assignment: Assignment) -> Assignment:
    """Return the assignment with recomputation on every stage, or where memory requires it."""
    mode = cost_model.options.recompute
    if mode == "never" or cost_model.only_forward:
        return assignment
    if mode == "always":
        return replace(assignment, recompute=(True,) * assignment.num_stages)
    try:
        stages = cost_model.stages(assignment)
    except InvalidInput:  # the schedule does not support these numbers: no plan either way
        return assignment
    again = tuple(
        stage.limit_bytes is not None and held > stage.limit_bytes
        for stage, held in zip(stages, cost_model.held_bytes(stages, assignment), strict=True)
    )
    return replace(assignment, recompute=again)


def list_baselines(
    request: PlanningRequest, chosen: Assignment
) -> Iterator[tuple[str, Assignment]]:
    """Yield baselines by name; some may not be usable.

    Equal layer counts and even times keep the plan's stages, replicas and devices; if the plan has
    a single stage, they are pipelines with one device per stage instead. If it has several,
    ``data_parallel`` is the whole model on each of its devices, if the options allow it.
    """
    shape = chosen if chosen.num_stages > 1 else one_device_a_stage(request, chosen)
    if shape is not None:
        for name, cuts in (
            ("equal_layers", equal_layers(len(request.profile.layers), shape.num_stages)),
            ("balance_by_time", even_times(request.costs, shape.num_stages)),
        ):
            if cuts is not None:
                other = replace(shape, cuts=cuts)
                yield name, other if shape is chosen else apply_recompute(request.cost_model, other)
    alone = data_parallel(request, chosen)
    if alone is not None and request.allows(alone):
        yield "data_parallel", alone


def take_faster_baseline(request: PlanningRequest, costed: CostedPlan) -> CostedPlan:
    """Return the plan, or a faster baseline of it, repeated until no baseline is faster."""
    # A complete search beats all baselines; one cut short by its deadline may not.
    while True:
        best = costed
        for _, other in list_baselines(request, costed.assignment):
            found = (
                request.cost_model.evaluate_if_feasible(other) if request.allows(other) else None
            )
            if found is not None and found.step_time_s < best.step_time_s:
                best = found
        if best is costed:
            return costed
        costed = best


def one_device_a_stage(request: PlanningRequest, chosen: Assignment) -> Assignment | None:
    """Return a pipeline with one stage on each device of the plan, or of the cluster if it has one.

    Cuts are those of even times. Returns `None` if fewer than two stages are possible.
    """
    found = [(number, rank) for _, number, rank in list_slots(request.devices, chosen)]
    if len(found) == 1:
        found = list_in_device_order(request.devices)
    most = min(
        len(found), max(stage_counts(request.cost_model), default=1), request.costs.num_atoms
    )
    if most < 2:
        return None
    even = even_times(request.costs, most)
    assert even is not None, "there are as many atoms"
    return Assignment(
        cuts=even,
        replicas=(1,) * most,
        classes=tuple(number for number, _ in found[:most]),
        ends=tuple(rank + 1 for _, rank in found[:most]),
        recompute=(False,) * most,
    )


def data_parallel(request: PlanningRequest, chosen: Assignment) -> Assignment | None:
    """Return the whole model on each device of a plan of several stages, if those are alike."""
    if chosen.num_stages == 1 or chosen.chunks > 1 or len(set(chosen.classes)) > 1:
        return None
    count = min(sum(chosen.replicas), request.cost_model.num_microbatches)
    if count == 1:
        return None
    whole = (0, len(request.profile.layers))
    found = place_stages(whole, [count], request.devices, classes=chosen.classes[:1])
    return found and apply_recompute(request.cost_model, found)


def list_slots(devices: Devices, chosen: Assignment) -> list[tuple[int, int, int]]:
    """List a plan's devices in pipeline order: index in the cluster, class, rank in the class."""
    found = dict.fromkeys(
        (number, rank)
        for number, end, count in zip(chosen.classes, chosen.ends, chosen.replicas, strict=True)
        for rank in range(end - count, end)
    )
    return [(devices.classes[number].devices[rank], number, rank) for number, rank in found]


def rejection_reason(request: PlanningRequest, assignment: Assignment) -> str:
    """Return why an assignment cannot be used, in words; empty if it can."""
    return next(_rejection_reasons(request, assignment), "")


def _rejection_reasons(request: PlanningRequest, assignment: Assignment) -> Iterator[str]:
    yield from _wrong_cuts(request, assignment.cuts)
    if not request.allows(assignment):
        yield "the options ask for other stages, replicas or pins"
    try:
        yield from _too_large(request, assignment)
        # This simulates the step, so it comes after the cheap checks.
        request.cost_model.evaluate(assignment)
    except InvalidInput as error:
        yield str(error)


def _too_large(request: PlanningRequest, assignment: Assignment) -> Iterator[str]:
    stages = request.cost_model.stages(assignment)
    held = request.cost_model.held_bytes(stages, assignment)
    for number, (stage, needed) in enumerate(zip(stages, held, strict=True)):
        if stage.limit_bytes is not None and needed > stage.limit_bytes:
            index = assignment.device_indices(request.devices, number)[0]
            name = request.cluster.devices[index].name
            what = f"stage {number} needs {_bytes(needed)}, device {name!r}"
            if needed > stage.memory.total_bytes:
                what = f"device {name!r} needs {_bytes(needed)} for all its stages, and"
            yield f"{what} allows {_bytes(stage.limit_bytes)}"


def _wrong_cuts(request: PlanningRequest, cuts: tuple[int, ...]) -> Iterator[str]:
    profile, allowed = request.profile, set(request.positions)
    if any(first >= last for first, last in pairwise(cuts)):
        yield "it leaves a stage empty"
    for cut in cuts[1:-1]:
        if cut not in allowed:
            name = profile.layers[cut - 1].layer.name
            boundary = profile.boundaries[cut - 1]
            reason = FORBIDDEN
            if not boundary.legal:
                reason = boundary.reason or "the profile forbids it"
            yield f"no cut may be made behind layer {name!r}: {reason}"


def _bytes(size_bytes: int) -> str:
    # Two different sizes may look equal once rounded, so the exact one is given, too.
    return f"{format_bytes(size_bytes)} ({size_bytes} bytes)"
