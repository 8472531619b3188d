"""Plans by simple rules: candidates that compete with those of the exact search, and baselines.

Baselines are printed beside a plan, on its own devices; the plan is not slower than any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations

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
from .published_rules import pipedream_plan, torchgpipe_balance

FORBIDDEN = "the options forbid it"
"""Reason of a baseline that options rule out."""

MAX_PIPEDREAM_SIZE = 2_000
"""Positions times devices up to which PipeDream's plan is a candidate: 30 ms."""

MAX_TORCHGPIPE_SIZE = 4_000
"""Positions times stages up to which torchgpipe's cuts are candidates: 30 ms."""

MAX_RESHAPED = 8
"""Stages up to which replicas are moved between every pair of stages."""

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
    key = "even times", num_stages
    if key in costs.cuts_by_rule:
        return costs.cuts_by_rule[key]
    work = costs.forward_s + costs.backward_s
    atoms = [float(work[index, index + 1]) for index in range(costs.num_atoms)]
    blocks = to_cuts(balance(atoms, num_stages))
    costs.cuts_by_rule[key] = tuple(costs.positions[block] for block in blocks)
    return costs.cuts_by_rule[key]


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
    """Yield plans with equal replicas for all stages, cut by even times, counts and torchgpipe."""
    for num_stages, replicas in _promising(cost_model):
        cuts = {equal_layers(len(cost_model.costs.profile.layers), num_stages)}
        for found in (
            even_times(cost_model.costs, num_stages),
            _torchgpipe(cost_model.costs, num_stages),
        ):
            if found:
                cuts.add(found)
        for entry in sorted(cuts):
            if cost_model.costs.has(entry):
                yield from _on_devices(cost_model, entry, [replicas] * num_stages)


def _torchgpipe(costs: ChainCosts, num_stages: int) -> Cuts | None:
    if num_stages > costs.num_atoms or num_stages * costs.num_atoms > MAX_TORCHGPIPE_SIZE:
        return None
    key = "torchgpipe", num_stages
    if key in costs.cuts_by_rule:
        return costs.cuts_by_rule[key]
    layers = costs.profile.layers
    layer_s = [entry.forward.median_s + entry.backward.median_s for entry in layers]
    counts = torchgpipe_balance(layer_s, num_stages, costs.positions)
    # torchgpipe may leave a stage empty
    costs.cuts_by_rule[key] = to_cuts(counts) if all(counts) else None
    return costs.cuts_by_rule[key]


def pipedream_plans(cost_model: CostModel) -> Iterator[Assignment]:
    """Yield PipeDream's plan for the cluster and for each class, by each level's bandwidth."""
    costs, devices = cost_model.costs, cost_model.devices
    numbers = {len(devices.cluster.devices), *(len(entry) for entry in devices.classes[:4])}
    for number in sorted(numbers):
        if costs.num_atoms * number > MAX_PIPEDREAM_SIZE:
            continue
        for bandwidth in dict.fromkeys(level.bandwidth_bytes_per_s for level in devices.levels):
            found = pipedream_plan(costs.profile, number, bandwidth, costs.positions)
            if found is not None:
                counts, replicas = found
                yield from _on_devices(cost_model, to_cuts(counts), replicas)


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
        found = place_stages(cuts, replicas, devices, class_index=number)
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


def move_cuts(assignment: Assignment, costs: ChainCosts) -> Iterator[Assignment]:
    """Yield assignments with one cut moved to the previous or next position."""
    for place in range(1, len(assignment.cuts) - 1):
        index = costs.index[assignment.cuts[place]]
        for other in (index - 1, index + 1):
            layer = costs.positions[other]
            cuts = (*assignment.cuts[:place], layer, *assignment.cuts[place + 1 :])
            if all(first < last for first, last in pairwise(cuts)):
                yield replace(assignment, cuts=cuts)


def reshape_stages(assignment: Assignment, cost_model: CostModel) -> Iterator[Assignment]:
    """Yield assignments with replicas moved between stages, one stage split, or two merged.

    The closed form favours equal replicas; the simulator may not. Only for few stages, all on one
    class of devices.
    """
    if len(set(assignment.classes)) > 1 or assignment.num_stages > MAX_RESHAPED:
        return
    devices, replicas = cost_model.devices, assignment.replicas
    entry = devices.classes[assignment.classes[0]]
    steps = {1, *(size for size in entry.group_sizes[:-1] if size < len(entry))}
    changes: list[tuple[Cuts, Sequence[int], Sequence[bool]]] = []
    # Single devices and whole groups move; stage -1 stands for devices that the plan leaves idle.
    for step in sorted(steps):
        for taken, given in permutations(range(-1, assignment.num_stages), 2):
            moved = [
                count + step * ((stage == given) - (stage == taken))
                for stage, count in enumerate(replicas)
            ]
            changes.append((assignment.cuts, moved, assignment.recompute))
    changes += _split(assignment, cost_model.costs)
    changes += _merged(assignment)
    for cuts, counts, recompute in changes:
        if min(counts) > 0 and sum(counts) <= len(entry):
            found = place_stages(
                cuts, counts, devices, class_index=assignment.classes[0], recompute=recompute
            )
            if found is not None:
                yield found


def _split(
    assignment: Assignment, costs: ChainCosts
) -> Iterator[tuple[Cuts, Sequence[int], Sequence[bool]]]:
    """Yield splits of each replicated stage at the middle of its work, sharing its replicas."""
    work = costs.forward_s + costs.backward_s
    cuts, replicas, recompute = assignment.cuts, assignment.replicas, assignment.recompute
    for s, count in enumerate(replicas):
        first, last = costs.index[cuts[s]], costs.index[cuts[s + 1]]
        if count < 2 or last - first < 2:
            continue
        whole = float(work[first, last])
        middle = min(range(first + 1, last), key=lambda at: abs(float(work[first, at]) - whole / 2))
        front = round(count * float(work[first, middle]) / whole) if whole else count // 2
        front = min(max(front, 1), count - 1)
        yield (
            (*cuts[: s + 1], costs.positions[middle], *cuts[s + 1 :]),
            (*replicas[:s], front, count - front, *replicas[s + 1 :]),
            (*recompute[: s + 1], *recompute[s:]),
        )


def _merged(assignment: Assignment) -> Iterator[tuple[Cuts, Sequence[int], Sequence[bool]]]:
    """Yield merges of two neighbouring stages on the devices of both."""
    cuts, replicas, recompute = assignment.cuts, assignment.replicas, assignment.recompute
    for s in range(assignment.num_stages - 1):
        yield (
            (*cuts[: s + 1], *cuts[s + 2 :]),
            (*replicas[:s], replicas[s] + replicas[s + 1], *replicas[s + 2 :]),
            (*recompute[:s], recompute[s] or recompute[s + 1], *recompute[s + 2 :]),
        )


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
    found = place_stages(whole, [count], request.devices, class_index=chosen.classes[0])
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
            yield (
                f"stage {number} needs {_bytes(needed)}, device "
                f"{request.cluster.devices[index].name!r} allows {_bytes(stage.limit_bytes)}"
            )


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
