"""Plan validation: accept or reject any plan by deriving its numbers again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.plan import Baseline, DirectSend, Plan, Stage
from ...core.profile.module_chain import find_chain_break
from ...core.profile.profile import Profile
from ..dag.reorder import by_name, reorder_profile
from ..problem.input_checks import parse_cluster, require_plan, require_profile, scale_to_plan
from ..simulator.plan_timeline import plan_timeline
from .reference_checkpoints import checkpoint_faults, reduce_checkpoints
from .reference_cost import ReferenceSplit
from .reference_tensor import group_faults, reduce_to_groups

TOLERANCE = 1e-9
"""Relative difference allowed between a time in the plan and the reference computation."""


def validate(plan: Plan, profile: Profile, cluster: Cluster | str) -> None:
    """Check a plan against the profile and cluster it claims to be made for.

    The profile is the one that the plan names; if the plan chose the micro-batch size, the profile
    is scaled to that size first.

    Layers, placement, legality of cuts, options, times, bytes, memory and its limits, the
    simulated step, the baselines and the proof's value are derived again from the profile. The
    proof's bounds are only checked for consistency: at most the value and the simulated step, and
    equal to the value if the plan is called optimal.

    Raises:
        PlanMismatch: The plan is for another profile or cluster, or a number in it is wrong; the
            message lists every discrepancy found.
    """
    plan, profile, cluster = require_plan(plan), require_profile(profile), parse_cluster(cluster)
    profile_id = profile.content_id()
    faults_of_groups = list(group_faults(plan, profile, cluster))
    faults = list(faults_of_groups)
    if not faults:
        plan, profile, cluster = reduce_to_groups(plan, profile, cluster)
    if plan.layer_names == tuple(entry.layer.name for entry in profile.layers):
        faults += checkpoint_faults(plan, profile)
        plan, profile = reduce_checkpoints(plan, profile)
    profile = scale_to_plan(plan, profile)
    faults += _identity_faults(plan, profile, profile_id)
    unknown = list(_device_faults(plan, cluster))
    try:
        profile = as_ordered(plan, profile)
    except InvalidInput as error:
        unknown.append(str(error))
    faults += unknown
    if plan.layer_names != tuple(entry.layer.name for entry in profile.layers):
        faults.append("its layers are not the profile's layers, each once and in order")
    elif (
        not unknown and not faults_of_groups
    ):  # unknown devices have no placement to derive anything from
        split = to_reference_split(plan, profile, cluster)
        faults += split.faults()
        if next(split.basic_faults(), None) is None:
            faults += _boundary_faults(plan, split)
            for index, stage in enumerate(plan.stages):
                faults += _stage_faults(stage, index, split)
            faults += _direct_faults(plan, split)
            faults += _step_faults(plan, split)
            faults += _proof_faults(plan, split)
            for baseline in plan.baselines:
                faults += _baseline_faults(baseline, split)
    if faults:
        raise PlanMismatch("the plan is not valid:\n  " + "\n  ".join(faults))


def as_ordered(plan: Plan, profile: Profile) -> Profile:
    """Return the profile with its layers in the plan's order."""
    if not plan.layer_order:
        return profile
    if plan.options.layer_order == "given":
        raise InvalidInput("its layers are reordered despite layer_order='given'")
    if len(plan.layer_order) != len(profile.layers):
        raise InvalidInput(
            f"layer_order has {len(plan.layer_order)} layers, the profile {len(profile.layers)}"
        )
    return reorder_profile(profile, plan.layer_order)


def to_reference_split(plan: Plan, profile: Profile, cluster: Cluster) -> ReferenceSplit:
    """Return the plan's choices without its numbers."""
    index = {device.name: number for number, device in enumerate(cluster.devices)}
    return ReferenceSplit(
        counts=plan.balance,
        devices=tuple(tuple(index[name] for name in stage.devices) for stage in plan.stages),
        profile=profile,
        cluster=cluster,
        options=plan.options,
        recompute=tuple(stage.recompute == "always" for stage in plan.stages),
        held=tuple(stage.in_flight for stage in plan.stages),
        chunks=plan.chunks,
        direct=bool(plan.direct_sends),
    )


def _identity_faults(plan: Plan, profile: Profile, profile_id: str) -> Iterable[str]:
    if plan.profile_id != profile_id:
        source = plan.profile_id or "a profile it does not name"
        yield f"it was planned from {source}, this profile is {profile_id}"
    options = plan.options
    only_forward = options.objective == "latency"
    schedule = "forward_only" if only_forward else options.schedule
    num_microbatches = 1 if only_forward else options.num_microbatches
    for name, found, expected in (
        ("model", plan.model, profile.model),
        ("spec", plan.spec, profile.spec),
        ("inputs", plan.inputs, profile.inputs),
        ("input_structure", plan.input_structure, profile.input_structure),
        ("fixed_mode", plan.fixed_mode, profile.fixed_mode),
        ("chain_break", plan.chain_break, plan.chain_break and find_chain_break(profile)),
        ("estimated", plan.estimated, profile.provenance.source == "estimated"),
        ("error_band", plan.error_band, profile.provenance.error_band),
        ("schedule", plan.schedule, schedule),
        ("num_microbatches", plan.num_microbatches, num_microbatches),
        ("batch_size", options.batch_size, _samples(plan)),
    ):
        if found != expected:
            yield f"{name} is {found!r}, expected {expected!r}"


def _samples(plan: Plan) -> int | None:
    if plan.options.batch_size is None or not plan.inputs or not plan.inputs[0].shape:
        return plan.options.batch_size
    return plan.inputs[0].shape[0] * plan.options.num_microbatches


def _device_faults(plan: Plan, cluster: Cluster) -> Iterable[str]:
    names = {device.name for device in cluster.devices}
    for index, stage in enumerate(plan.stages):
        for name in stage.devices:
            if name not in names:
                yield f"stage {index} is on {name}, which the cluster does not have"
        if stage.recompute == "except_last":
            yield f"stage {index}: recompute='except_last' is not supported by the cost model"


def _boundary_faults(plan: Plan, split: ReferenceSplit) -> Iterable[str]:
    expected = split.boundaries()
    if len(plan.boundaries) != len(expected):
        yield f"it lists {len(plan.boundaries)} boundaries for {len(expected)} cuts"
    for index, (found, boundary) in enumerate(zip(plan.boundaries, expected, strict=False)):
        if by_name(found) != by_name(boundary):
            yield f"boundaries[{index}] differs from the profile's boundary after {boundary.after}"


def _stage_faults(stage: Stage, index: int, split: ReferenceSplit) -> Iterable[str]:
    forward_s, backward_s = split.work_s(index)
    parts_s, found_input_s = split.backward_parts_s(index), stage.backward_input_time_s
    if (parts_s is None) != (found_input_s is None):
        yield f"stage {index}: backward_input_time_s is {found_input_s!r}, expected {parts_s!r}"
    forward_bytes, forward_send_s = split.send_forward(index)
    backward_bytes, backward_send_s = split.send_backward(index)
    for name, found_s, expected_s in (
        ("forward_time_s", stage.forward_time_s, forward_s),
        ("backward_time_s", stage.backward_time_s, backward_s),
        ("backward_input_time_s", found_input_s or 0.0, parts_s[0] if parts_s else 0.0),
        ("send_forward_time_s", stage.send_forward_time_s, forward_send_s),
        ("send_backward_time_s", stage.send_backward_time_s, backward_send_s),
        ("sync_time_s", stage.sync_time_s, split.sync_s(index)),
    ):
        if not math.isclose(found_s, expected_s, rel_tol=TOLERANCE):
            yield f"stage {index}: {name} is {found_s!r}, expected {expected_s!r}"
    layers = [split.profile.layers[layer].layer for layer in split.layers(index)]
    fqns = {fqn for layer in layers for fqn in layer.module_fqns}
    for name, found, expected in (
        ("send_forward_bytes", stage.send_forward_bytes, forward_bytes),
        ("send_backward_bytes", stage.send_backward_bytes, backward_bytes),
        ("module_fqns", sorted(stage.module_fqns), sorted(fqns)),
        ("memory", stage.memory, split.memory(index)),
        ("memory_limit_bytes", stage.memory_limit_bytes, split.limit_bytes(index)),
        ("reserved", stage.reserved.total_bytes, split.reserved_bytes(index)),
        ("strategy", repr(stage.strategy), repr(split.strategy(index))),
    ):
        if found != expected:
            yield f"stage {index}: {name} is {found}, expected {expected}"


def _step_faults(plan: Plan, split: ReferenceSplit) -> Iterable[str]:
    tied_s = split.tied_sync_s()
    if not math.isclose(plan.tied_sync_time_s, tied_s, rel_tol=TOLERANCE):
        yield f"tied_sync_time_s is {plan.tied_sync_time_s!r}, expected {tied_s!r}"
    for name, found, expected in zip(
        ("forward_channels", "backward_channels", "forward_channel", "backward_channel"),
        _numbered(plan, split.num_stages - 1),
        split.all_channels(),
        strict=True,
    ):
        if found != expected:
            yield f"{name} is {list(found)}, expected {list(expected)} (numbered as they appear)"
    try:
        timeline = plan_timeline(plan)
    except InvalidInput as error:
        yield str(error)
        return
    if not math.isclose(plan.step_time_s, timeline.step_time_s, rel_tol=TOLERANCE):
        yield f"step_time_s is {plan.step_time_s!r}, simulated {timeline.step_time_s!r}"
    if not math.isclose(plan.bubble_fraction, timeline.bubble_fraction, abs_tol=TOLERANCE):
        yield f"bubble_fraction is {plan.bubble_fraction!r}, simulated {timeline.bubble_fraction!r}"


def _numbered(plan: Plan, num_cuts: int) -> tuple[tuple[int, ...], ...]:
    """Return a plan's shared connections, renumbered in order of appearance; -1 for unlisted ones.

    Cuts forward and backward come first, then direct sends forward and backward.
    """
    own = (-1,) * num_cuts
    listed = (
        plan.forward_channels or own,
        plan.backward_channels or own,
        tuple(send.forward_channel for send in plan.direct_sends),
        tuple(send.backward_channel for send in plan.direct_sends),
    )
    numbers = {-1: -1}
    for channel in chain(*listed):
        numbers.setdefault(channel, len(numbers) - 1)
    return tuple(tuple(numbers[entry] for entry in channels) for channels in listed)


def _direct_faults(plan: Plan, split: ReferenceSplit) -> Iterator[str]:
    if plan.direct_sends and plan.options.skips == "relay":
        yield "it has direct sends despite skips='relay'"
    expected = split.direct_sends()
    if len(plan.direct_sends) != len(expected):
        yield f"it has {len(plan.direct_sends)} direct sends, expected {len(expected)}"
    for found, wanted in zip(plan.direct_sends, expected, strict=False):
        where = f"the direct send from stage {found.source} to {found.target}"
        if _without_times(found) != _without_times(wanted):
            yield f"{where} is {_without_times(found)}, expected {_without_times(wanted)}"
        for name in ("forward_time_s", "backward_time_s"):
            pair = getattr(found, name), getattr(wanted, name)
            if not math.isclose(*pair, rel_tol=TOLERANCE):
                yield f"{where}: {name} is {pair[0]!r}, expected {pair[1]!r}"
    fastest_s = min(split.either_way()) if plan.options.skips == "direct" else math.inf
    if plan.step_time_s > fastest_s * (1 + TOLERANCE):
        yield f"step_time_s is {plan.step_time_s!r}, with relays or direct sends {fastest_s!r}"


def _without_times(send: DirectSend) -> tuple[object, ...]:
    names = sorted(send.tensors)
    return send.source, send.target, names, send.forward_bytes, send.backward_bytes


def _proof_faults(plan: Plan, split: ReferenceSplit) -> Iterator[str]:
    proof = plan.proof
    if plan.options.objective != "pipedream":  # PipeDream's formula exists once, in `pipedream`
        of_step = plan.options.objective == "step_time"  # which `_step_faults` checks
        value = plan.step_time_s if of_step else split.objective()
        if not math.isclose(proof.value, value, rel_tol=TOLERANCE):
            yield f"proof.value is {proof.value!r}, expected {value!r}"
    if proof.lower_bound > proof.value:
        yield f"proof.lower_bound {proof.lower_bound!r} is above proof.value {proof.value!r}"
    is_proven = math.isclose(proof.lower_bound, proof.value, rel_tol=TOLERANCE)
    if proof.status == "optimal" and not is_proven:
        yield f"proof.status is 'optimal' with a gap of {proof.gap:.3g}"
    if proof.simulated_lower_bound_s > plan.step_time_s * (1 + TOLERANCE):
        yield (
            f"proof.simulated_lower_bound_s {proof.simulated_lower_bound_s!r} is above "
            f"step_time_s {plan.step_time_s!r}"
        )


def _baseline_faults(baseline: Baseline, split: ReferenceSplit) -> Iterable[str]:
    counts, num_layers = baseline.balance, len(split.profile.layers)
    own = _move_to_devices(baseline, split)
    if own is None:
        yield f"baseline {baseline.name!r} is on devices that the cluster does not have"
        return
    split = own
    if len(counts) != split.num_stages or min(counts) < 1 or sum(counts) != num_layers:
        yield (
            f"baseline {baseline.name!r} is {list(counts)}, which is not {num_layers} layers in "
            f"{split.num_stages} stages"
        )
        return
    if baseline.name == "equal_layers" and not _is_equal(counts):
        yield f"baseline {baseline.name!r} is {list(counts)}, which are not equal layer counts"
    other = replace(split, counts=counts)
    if baseline.devices and next(other.basic_faults(), None) is None:
        other = _recompute_full_stages(other)
    # Usable means that it fits with relays, which need most memory; the faster way is timed.
    other = replace(other, direct=False)
    found_s = baseline.step_time_s
    expected_s = min(other.either_way()) if other.is_usable() else None
    if found_s is None or expected_s is None:
        is_right = found_s is expected_s
    else:
        is_right = math.isclose(found_s, expected_s, rel_tol=TOLERANCE)
    if not is_right:
        yield f"baseline {baseline.name!r}: step_time_s is {found_s!r}, expected {expected_s!r}"


def _move_to_devices(baseline: Baseline, split: ReferenceSplit) -> ReferenceSplit | None:
    if not baseline.devices:
        return split
    index = {device.name: number for number, device in enumerate(split.cluster.devices)}
    if not all(names and index.keys() >= set(names) for names in baseline.devices):
        return None
    devices = tuple(tuple(index[name] for name in names) for names in baseline.devices)
    return replace(
        split, counts=(0,) * len(devices), devices=devices, recompute=(), held=(), chunks=1
    )


def _recompute_full_stages(split: ReferenceSplit) -> ReferenceSplit:
    """Return the split with recomputation as the options demand or as memory requires."""
    mode = split.options.recompute
    if split.only_forward or mode == "never":
        return split
    again = []
    for stage in range(split.num_stages):
        limit = split.limit_bytes(stage)
        lacks_room = limit is not None and split.memory(stage).total_bytes > limit
        again.append(mode == "always" or lacks_room)
    return replace(split, recompute=tuple(again))


def _is_equal(counts: tuple[int, ...]) -> bool:
    # They differ by at most one, the larger ones in front.
    return counts[0] - counts[-1] <= 1 and list(counts) == sorted(counts, reverse=True)
