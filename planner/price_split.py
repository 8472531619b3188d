"""Evaluation of a hand-chosen split, with the checks of a planned one."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise

from ..core.cluster.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions
from ..core.profile.backward_parts import microbatch_s
from ..core.profile.profile import Profile
from ..core.units import format_bytes
from ..schedules.traits import FOLDED, SPLIT_BACKWARD
from .assemble import build_plan
from .cost.assignment import (
    Assignment,
    place_in_device_order,
    place_on,
    place_stages,
    repeat_rounds,
    to_cuts,
)
from .cost.plan_cost import Decision
from .heuristics.candidates import apply_recompute
from .problem.constraints import broken_option
from .problem.input_checks import count_chunks, parse_cluster, require_options, require_profile
from .problem.problem import PlanningRequest
from .tensor_degrees import DegreeProblem


def plan_from_balance(
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None,
    balance: Sequence[int],
    *,
    replicas: Sequence[int] = (),
    devices: Sequence[Sequence[int]] = (),
    profile_id: str | None = None,
) -> Plan:
    """Return the plan with these layer counts.

    Without replicas, stage s runs on device s; with them, stages take devices of the first kind
    in order, unless ``devices`` are given. If the schedule puts several stages on a device, it
    takes one of each round. Stages are recomputed as the options say. The proof's bound is a quick
    one, so even the best split may be reported as feasible only.

    Args:
        profile: Costs of the layers.
        cluster: Devices and links.
        options: As for `plan`; the split has to keep them.
        balance: Layers of each stage.
        replicas: Copies of each stage; one each if empty. Larger numbers raise ``max_replicas``.
        devices: Indices in the cluster of the devices of each stage, which also say the replicas.
        profile_id: The profile's `content_id`, if it is known already.

    Raises:
        InvalidInput: The counts do not cover the layers, a cut is illegal or forbidden by the
            options, or stages and pins are not what the options ask for; with the field
            ``/devices``, no price is known of replicas on these devices.
        Infeasible: A stage exceeds its device's memory, or there are more stages than devices.
    """
    profile, cluster = require_profile(profile), parse_cluster(cluster)
    options = require_options(options)
    if options.tensor == "auto":
        raise InvalidInput(
            "a given balance is priced for one number of devices that split layers, not for "
            "tensor='auto'; give a number",
            field="/options/tensor",
        )
    if options.tensor == 1 and options.recompute != "layers":
        return _price(profile, cluster, options, balance, replicas, devices, profile_id)
    groups = DegreeProblem.of((profile,), cluster, options, options.tensor)
    held = groups.find_groups(cluster, devices)
    made = _price(groups.profiles[0], groups.cluster, groups.options, balance, replicas, held)
    return groups.expand(made, cluster, profile_id or profile.content_id())


def _price(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    balance: Sequence[int],
    replicas: Sequence[int],
    devices: Sequence[Sequence[int]],
    profile_id: str | None = None,
) -> Plan:
    """Price a split on devices, or on groups of devices that split layers between them."""
    if options.num_stages is not None and options.num_stages != len(balance):
        raise InvalidInput(
            f"the balance has {len(balance)} stages but the options ask for {options.num_stages}",
            field="/balance",
        )
    counts = tuple(map(len, devices)) or tuple(replicas) or (1,) * len(balance)
    if len(counts) != len(balance):
        raise InvalidInput(
            f"{len(counts)} numbers of replicas for {len(balance)} stages", field="/replicas"
        )
    most = max(counts, default=1)
    if options.max_replicas is not None and options.max_replicas < most:
        options = options.model_copy(update={"max_replicas": most})
    request = PlanningRequest(profile, cluster, options)
    cuts = to_cuts(balance)
    _check_cuts(request, cuts)
    chosen = _placed(request, cuts, counts, devices)
    chosen = apply_recompute(request.cost_model, chosen)
    _check_kept(request, chosen)
    _check_memory(request, chosen)
    costed = request.cost_model.evaluate(chosen)
    _, least_s = microbatch_s(profile, splits=options.schedule in SPLIT_BACKWARD)
    trains = options.objective != "latency"
    bound_s = trains * least_s / request.devices.fastest * (1 - 1e-9)
    bound = bound_s if options.objective == "step_time" else 0.0
    return build_plan(request, Decision(costed, bound, bound_s), profile_id)


def _check_cuts(request: PlanningRequest, cuts: tuple[int, ...]) -> None:
    layers = request.profile.layers
    counts = [last - first for first, last in pairwise(cuts)]
    if cuts[-1] != len(layers) or min(counts, default=0) < 1:
        raise InvalidInput(
            f"balance {counts} has {sum(counts)} layers; it must have {len(layers)} in all, "
            "at least one in each stage",
            field="/balance",
        )
    for cut in cuts[1:-1]:
        boundary = request.profile.boundaries[cut - 1]
        reason = "" if boundary.legal else boundary.reason or "the profile forbids it"
        if not reason and cut not in request.positions:
            reason = "the options do (together, no_cut_after, tied, cut_at or regular)"
        if reason:
            raise InvalidInput(
                f"no cut is allowed between layers {layers[cut - 1].layer.name!r} and "
                f"{layers[cut].layer.name!r}: {reason}",
                field="/balance",
            )


def _check_kept(request: PlanningRequest, chosen: Assignment) -> None:
    if max(chosen.replicas) > 1 and request.state_note:
        raise InvalidInput(f"{request.state_note}; give every stage one replica", field="/replicas")
    broken = broken_option(chosen, request.profile, request.devices, request.options)
    if broken is not None:
        raise InvalidInput(
            f"the balance {broken.text}; change it, or the option: {broken.remedy}",
            field=f"/options/{broken.option}",
        )


def check_memory(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    balance: Sequence[int],
    devices: Sequence[int | None],
) -> None:
    """Refuse runs of layers that do not fit on their devices with one micro-batch in flight.

    A device may have several runs; one on `None` takes no memory. That is the least that any order
    of work needs.

    Raises:
        InvalidInput: A cut is illegal or forbidden by the options.
        Infeasible: A device needs more memory than it allows.
    """
    if options.tensor != 1:
        profile = DegreeProblem.of((profile,), cluster, options, int(options.tensor)).profiles[0]
    least = {"num_microbatches": 1, "schedule": "1f1b", "max_replicas": 1, "tensor": 1}
    options = options.model_copy(update={**least, "batch_size": None})
    request = PlanningRequest(profile, cluster, options)
    cuts = to_cuts(balance)
    _check_cuts(request, cuts)
    chosen = place_on(cuts, [(device or 0,) for device in devices], request.devices)
    if chosen is not None:
        elsewhere = {number for number, device in enumerate(devices) if device is None}
        _check_memory(request, apply_recompute(request.cost_model, chosen), elsewhere)


def _placed(
    request: PlanningRequest,
    cuts: tuple[int, ...],
    replicas: Sequence[int],
    devices: Sequence[Sequence[int]],
) -> Assignment:
    chunks = count_chunks(request.options)
    if len(replicas) % chunks:
        raise InvalidInput(
            f"the {request.options.schedule} schedule puts {chunks} stages on each device; the "
            f"balance has {len(replicas)}, give a multiple of {chunks}",
            field="/balance",
        )
    places = len(replicas) // chunks
    needed, available = sum(replicas[:places]), len(request.cluster.devices)
    size = request.options.tensor if isinstance(request.options.tensor, int) else 1
    units = f"groups of {size} devices" if size > 1 else "devices"
    first = cuts[: places + 1]
    found = place_on(first, devices[:places], request.devices) if devices else None
    if devices and found is None:
        raise InvalidInput(
            "a stage is on devices that differ, or that are not next to each other",
            field="/devices",
        )
    if needed <= available and not devices:
        found = (
            place_in_device_order(first, request.devices)
            if max(replicas) == 1
            else place_stages(first, replicas[:places], request.devices)
        )
    if found is None:
        raise Infeasible(
            f"{places} stages need {needed} {units}, but the cluster has {available}; use fewer "
            "stages or more devices"
            if needed > available
            else f"replicas {list(replicas)} cannot be placed: a stage has to lie inside one group "
            "of devices or fill whole groups",
            constraint="devices",
            required=needed * size,
            available=available * size,
        )
    folds = request.options.schedule in FOLDED
    return repeat_rounds(found, cuts, chunks, folds=folds) if chunks > 1 else found


def _check_memory(
    request: PlanningRequest, chosen: Assignment, elsewhere: Container[int] = ()
) -> None:
    """Refuse a split whose devices need more than they allow, for all stages they hold together."""
    layers, devices = request.profile.layers, request.cluster.devices
    held_here = enumerate(request.cost_model.stages(chosen))
    stages = [(number, stage) for number, stage in held_here if number not in elsewhere]
    held: dict[int, int] = {}
    for number, stage in stages:
        for index in chosen.device_indices(request.devices, number):
            held[index] = held.get(index, 0) + stage.memory.total_bytes
    for number, stage in stages:
        needed, limit = stage.memory.total_bytes, stage.limit_bytes
        for index in chosen.device_indices(request.devices, number):
            if limit is None or held[index] <= limit:
                continue
            first, last = chosen.cuts[number], chosen.cuts[number + 1] - 1
            others = ""
            if held[index] > needed:
                others = f", with its other stages {format_bytes(held[index])}"
            raise Infeasible(
                f"stage {number} (layers {first} to {last}, {layers[first].layer.name!r} to "
                f"{layers[last].layer.name!r}) needs {format_bytes(needed)} ({needed} bytes)"
                f"{others}, device {devices[index].name!r} allows {format_bytes(limit)} "
                f"({limit} bytes)",
                constraint="memory",
                required=held[index],
                available=limit,
            )
