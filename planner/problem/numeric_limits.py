"""Refuse numbers whose sums would overflow or lose bytes."""

from __future__ import annotations

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput
from ...core.plan.plan import OPTIMIZER_BYTES_PER_ELEMENT, PlanOptions
from ...core.profile.profile import Profile
from ..cost.chain import parameters_of
from ..cost.device_classes import LARGEST_TOTAL_BYTES, LARGEST_TOTAL_S, Devices


def check_magnitude(profile: Profile, devices: Devices, options: PlanOptions) -> None:
    """Raise `InvalidInput` where times or bytes are too large to add up exactly enough."""
    _check_bytes(profile, options)
    _check_times(profile, devices, options)
    _check_links(profile, devices.cluster, options)


def _check_bytes(profile: Profile, options: PlanOptions) -> None:
    state = OPTIMIZER_BYTES_PER_ELEMENT[options.optimizer]
    resident = sum(entry.size_bytes * 2 + entry.numel * state for entry in parameters_of(profile))
    per_microbatch = (
        sum(entry.size_bytes for entry in profile.storages)
        + sum(entry.saved_activation_bytes for entry in profile.layers)
        + sum(gap.forward_bytes + gap.backward_bytes for gap in profile.boundaries)
        + sum(tensor.size_bytes for tensor in profile.inputs)
        + (profile.loss.saved_activation_bytes if profile.loss else 0)
    )
    workspace = sum(entry.workspace_bytes for entry in profile.layers)
    total = resident + workspace + options.num_microbatches * per_microbatch
    if total > LARGEST_TOTAL_BYTES:
        raise InvalidInput(
            f"the profile's bytes add up to {total} over {options.num_microbatches} "
            f"micro-batches; at most {LARGEST_TOTAL_BYTES} (1 EiB) are accepted"
        )


def _check_times(profile: Profile, devices: Devices, options: PlanOptions) -> None:
    total_s = sum(entry.forward.median_s + entry.backward.median_s for entry in profile.layers)
    if profile.loss:
        total_s += profile.loss.forward.median_s + profile.loss.backward.median_s
    slowest = min(*(entry.speed for entry in devices.classes), 1.0)
    if not total_s / slowest * options.num_microbatches < LARGEST_TOTAL_S:
        raise InvalidInput(
            f"the profile's times add up to {total_s} s; less than {LARGEST_TOTAL_S:g} s over all "
            "micro-batches is accepted"
        )


def _check_links(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    num_devices = len(cluster.devices)
    parameters = parameters_of(profile)
    whole = sum(entry.size_bytes for entry in parameters)
    for level in cluster.levels:
        per_microbatch_s = sum(
            level.transfer_time_s(gap.forward_bytes) + level.transfer_time_s(gap.backward_bytes)
            for gap in profile.boundaries
        )
        summed_s = level.all_reduce_time_s(whole, num_devices) + sum(
            level.all_reduce_time_s(entry.size_bytes, num_devices)
            for entry in parameters
            if len(entry.layers) > 1
        )
        total_s = per_microbatch_s * options.num_microbatches + summed_s
        if not total_s < LARGEST_TOTAL_S:
            raise InvalidInput(
                f"link level {level.name!r} would take {total_s:g} s to send what the profile "
                f"exchanges; less than {LARGEST_TOTAL_S:g} s is accepted"
            )
