"""Accept or reject any plan, whoever made it, by deriving its numbers again.

Everything here is written as plain loops over the profile, apart from the planner's tables, so
that the two check each other. Only the schedule and its simulator are shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..core.cluster import Cluster, Device
from ..core.errors import InvalidInput, PlanMismatch
from ..core.graph import Parameter
from ..core.plan import OPTIMIZER_BYTES_PER_ELEMENT, MemoryUse, Plan, Stage
from ..core.profile import Profile
from .schedules import in_flight
from .timeline import plan_timeline

TOLERANCE = 1e-9
"""Relative difference allowed between a time in the plan and the same time derived again."""


def validate(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Check a plan against the profile and cluster it claims to be for.

    Layers, devices, legality of cuts, times, bytes, memory and its limits, the simulated step,
    and the proof's value are derived again from the profile.

    Raises:
        PlanMismatch: The plan is for another profile or cluster, or a number in it is wrong; the
            message lists every discrepancy found.
    """
    faults = list(_identity_faults(plan, profile))
    if plan.layer_names == tuple(entry.layer.name for entry in profile.layers):
        faults += _device_faults(plan, cluster)
        faults += _boundary_faults(plan, profile)
        for index in range(plan.num_stages):
            faults += _stage_faults(plan, index, profile, cluster)
        faults += _step_faults(plan, profile, cluster)
    else:
        faults.append("its layers are not the profile's, each once and in order")
    if faults:
        raise PlanMismatch("the plan does not hold:\n  " + "\n  ".join(faults))


def _identity_faults(plan: Plan, profile: Profile) -> Iterable[str]:
    """Whether plan and profile belong together."""
    if plan.profile_id and plan.profile_id != profile.content_id():
        yield f"it was planned from {plan.profile_id}, this profile is {profile.content_id()}"
    for name, found, expected in (
        ("model", plan.model, profile.model),
        ("inputs", plan.inputs, profile.inputs),
        ("input_structure", plan.input_structure, profile.input_structure),
        ("estimated", plan.estimated, profile.provenance.source == "estimated"),
        ("schedule", plan.schedule, plan.options.schedule),
        ("num_microbatches", plan.num_microbatches, plan.options.num_microbatches),
    ):
        if found != expected:
            yield f"{name} is {found!r}, expected {expected!r}"
    if plan.options.num_stages not in (None, plan.num_stages):
        yield f"it has {plan.num_stages} stages, {plan.options.num_stages} were asked for"


def _device_faults(plan: Plan, cluster: Cluster) -> Iterable[str]:
    """Stage s runs on the cluster's device s."""
    for index, stage in enumerate(plan.stages):
        expected = cluster.devices[index].name if index < len(cluster.devices) else None
        if stage.devices != (expected,):
            yield f"stage {index} is on {', '.join(stage.devices)}, expected {expected or 'none'}"
        if stage.recompute != "never" or stage.strategy != "single":
            yield f"stage {index} asks for recomputation or replicas, which are not priced yet"


def _boundary_faults(plan: Plan, profile: Profile) -> Iterable[str]:
    """Cuts are legal, and the plan carries the profile's account of them."""
    for index, stage in enumerate(plan.stages[:-1]):
        boundary = profile.boundaries[stage.first_layer + stage.num_layers - 1]
        if not boundary.legal:
            yield f"the cut behind stage {index} is not legal: {boundary.reason}"
        if plan.boundaries and plan.boundaries[index] != boundary:
            yield f"boundaries[{index}] is not the profile's boundary after {boundary.after}"


def _stage_faults(plan: Plan, index: int, profile: Profile, cluster: Cluster) -> Iterable[str]:
    """One stage's times, bytes, modules and memory."""
    stage = plan.stages[index]
    forward_s, backward_s = _work_s(stage, profile)
    (forward_bytes, forward_send_s), (backward_bytes, backward_send_s) = _sends(
        plan, index, profile, cluster
    )
    for name, found_s, expected_s in (
        ("forward_time_s", stage.forward_time_s, forward_s),
        ("backward_time_s", stage.backward_time_s, backward_s),
        ("send_forward_time_s", stage.send_forward_time_s, forward_send_s),
        ("send_backward_time_s", stage.send_backward_time_s, backward_send_s),
    ):
        if not math.isclose(found_s, expected_s, rel_tol=TOLERANCE):
            yield f"stage {index}: {name} is {found_s!r}, expected {expected_s!r}"
    fqns = {fqn for layer in _layers(stage) for fqn in profile.layers[layer].layer.module_fqns}
    held = in_flight(plan.options.schedule, index, plan.num_stages, plan.num_microbatches)
    memory = _memory(plan, stage, profile, held)
    limit = _limit_bytes(cluster.devices[index], plan) if index < len(cluster.devices) else None
    for name, found, expected in (
        ("send_forward_bytes", stage.send_forward_bytes, forward_bytes),
        ("send_backward_bytes", stage.send_backward_bytes, backward_bytes),
        ("module_fqns", sorted(stage.module_fqns), sorted(fqns)),
        ("in_flight", stage.in_flight, held),
        ("memory", stage.memory, memory),
        ("memory_limit_bytes", stage.memory_limit_bytes, limit),
    ):
        if found != expected:
            yield f"stage {index}: {name} is {found}, expected {expected}"
    if limit is not None and memory.total_bytes > limit:
        yield f"stage {index}: needs {memory.total_bytes} bytes, its device allows {limit}"


def _step_faults(plan: Plan, profile: Profile, cluster: Cluster) -> Iterable[str]:
    """The step as a whole: tied gradients, simulated time, bubble, proof."""
    tied_s = _tied_sync_s(plan, profile, cluster)
    if not math.isclose(plan.tied_sync_time_s, tied_s, rel_tol=TOLERANCE):
        yield f"tied_sync_time_s is {plan.tied_sync_time_s!r}, expected {tied_s!r}"
    try:
        timeline = plan_timeline(plan)
    except InvalidInput as error:
        yield str(error)
        return
    if not math.isclose(plan.step_time_s, timeline.step_time_s, rel_tol=TOLERANCE):
        yield f"step_time_s is {plan.step_time_s!r}, simulated {timeline.step_time_s!r}"
    if not math.isclose(plan.bubble_fraction, timeline.bubble_fraction, abs_tol=TOLERANCE):
        yield f"bubble_fraction is {plan.bubble_fraction!r}, simulated {timeline.bubble_fraction!r}"
    value_s, proof = _objective_s(plan, profile, cluster, tied_s), plan.proof
    if not math.isclose(proof.value, value_s, rel_tol=TOLERANCE):
        yield f"proof.value is {proof.value!r}, expected {value_s!r}"
    if proof.lower_bound > proof.value:
        yield f"proof.lower_bound {proof.lower_bound!r} is above proof.value {proof.value!r}"
    is_proven = math.isclose(proof.lower_bound, proof.value, rel_tol=TOLERANCE)
    if proof.status == "optimal" and not is_proven:
        yield f"proof.status is 'optimal' with a gap of {proof.gap:.3g}"


def _layers(stage: Stage) -> range:
    return range(stage.first_layer, stage.first_layer + stage.num_layers)


def _is_last(stage: Stage, profile: Profile) -> bool:
    return stage.first_layer + stage.num_layers == len(profile.layers)


def _work_s(stage: Stage, profile: Profile) -> tuple[float, float]:
    """Forward and backward; the last stage also carries the loss."""
    entries = [profile.layers[layer] for layer in _layers(stage)]
    forward_s = math.fsum(entry.forward.median_s for entry in entries)
    backward_s = math.fsum(entry.backward.median_s for entry in entries)
    if profile.loss and _is_last(stage, profile):
        forward_s += profile.loss.forward.median_s
        backward_s += profile.loss.backward.median_s
    return forward_s, backward_s


def _sends(
    plan: Plan, index: int, profile: Profile, cluster: Cluster
) -> tuple[tuple[int, float], tuple[int, float]]:
    """Bytes and time of what a stage sends forward and back."""
    stage = plan.stages[index]
    forward, backward = (0, 0.0), (0, 0.0)
    if index + 1 < min(plan.num_stages, len(cluster.devices)):
        size = profile.boundaries[stage.first_layer + stage.num_layers - 1].forward_bytes
        forward = size, cluster.link(index, index + 1).transfer_time_s(size)
    if 0 < index < len(cluster.devices):
        size = profile.boundaries[stage.first_layer - 1].backward_bytes
        backward = size, cluster.link(index - 1, index).transfer_time_s(size)
    return forward, backward


def _memory(plan: Plan, stage: Stage, profile: Profile, held: int) -> MemoryUse:
    """Every byte counted again, storage by storage."""
    layers = set(_layers(stage))
    weights = gradients = state = 0
    for parameter in _parameters(profile):
        if layers.isdisjoint(parameter.layers):
            continue
        weights += parameter.size_bytes
        if _is_learned(parameter):
            gradients += parameter.size_bytes
            state += parameter.numel * OPTIMIZER_BYTES_PER_ELEMENT[plan.options.optimizer]
    saved = 0
    for storage in profile.storages:
        saved += 0 if layers.isdisjoint(storage.layers) else storage.size_bytes
    if not profile.storages:
        saved = sum(profile.layers[layer].saved_activation_bytes for layer in layers)
    if profile.loss and _is_last(stage, profile):
        saved += profile.loss.saved_activation_bytes
    received = 0
    if stage.first_layer > 0:
        received += profile.boundaries[stage.first_layer - 1].forward_bytes
    if not _is_last(stage, profile):
        received += profile.boundaries[stage.first_layer + stage.num_layers - 1].backward_bytes
    return MemoryUse(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        activations_bytes=saved * held,
        workspace_bytes=max(profile.layers[layer].workspace_bytes for layer in layers),
        receive_buffers_bytes=received * plan.num_microbatches,
    )


def _parameters(profile: Profile) -> list[Parameter]:
    """The profile's, or one fp32 weight a layer where it lists none."""
    if profile.parameters:
        return list(profile.parameters)
    parameters = []
    for index, entry in enumerate(profile.layers):
        size = entry.layer.parameter_bytes
        parameters.append(
            Parameter(names=("weight",), size_bytes=size, numel=(size + 3) // 4, layers=(index,))
        )
    return parameters


def _is_learned(parameter: Parameter) -> bool:
    return parameter.kind == "parameter" and parameter.trainable


def _limit_bytes(device: Device, plan: Plan) -> int | None:
    if device.memory_bytes is None:
        return None
    return int(device.memory_bytes * plan.options.memory_fraction)


def _tied_sync_s(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """One ring after another over the stages that own each tied weight."""
    total_s = 0.0
    for parameter in profile.parameters:
        owners = []
        for index, stage in enumerate(plan.stages[: len(cluster.devices)]):
            if not set(_layers(stage)).isdisjoint(parameter.layers):
                owners.append(index)
        if _is_learned(parameter) and len(owners) > 1:
            link = cluster.link(owners[0], owners[-1])
            total_s += link.all_reduce_time_s(parameter.size_bytes, len(owners))
    return total_s


def _objective_s(plan: Plan, profile: Profile, cluster: Cluster, tied_s: float) -> float:
    """The closed form of `objective`, from the profile alone."""
    forwards, backwards, whole = [], [], []
    for index, stage in enumerate(plan.stages):
        forward_s, backward_s = _work_s(stage, profile)
        outgoing_s = 0.0
        if index + 1 < min(plan.num_stages, len(cluster.devices)):
            outgoing_s += _sends(plan, index, profile, cluster)[0][1]
            outgoing_s += _sends(plan, index + 1, profile, cluster)[1][1]
        forwards.append(forward_s)
        backwards.append(backward_s)
        whole.append(forward_s + backward_s + outgoing_s)
    slowest_s = max(whole)
    if plan.schedule == "gpipe":
        slowest_s = max(forwards) + max(backwards)
    return sum(whole) + (plan.num_microbatches - 1) * slowest_s + tied_s
