"""What every possible stage costs: one table per quantity, indexed [first, last).

This is the only place where a profile's numbers become a stage's time and memory. All tables
have shape (L + 1, L + 1) for L layers; entry [first, last] is the stage of layers
first, ..., last - 1, and only entries with first < last mean anything. O(L^2) time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..core.cluster import Cluster
from ..core.errors import InvalidInput
from ..core.graph import Parameter
from ..core.plan import OPTIMIZER_BYTES_PER_ELEMENT, MemoryUse, PlanOptions
from ..core.profile import Profile
from .simulate import StageTimes

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]

LARGEST_TOTAL_BYTES = 2**53
"""Above this (8 PiB) sums of bytes are no longer exact in a float."""

LARGEST_TOTAL_S = 1e12
"""Above this (30,000 years) a time is a mistake, and sums could become infinite."""


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Costs of every interval of layers of one profile on one cluster.

    Attributes:
        forward_s: Forward time per micro-batch, the loss included where ``last`` is L.
        backward_s: Backward time per micro-batch, likewise.
        weights_bytes: Parameters and buffers used, each storage once.
        gradients_bytes: One gradient per trainable parameter, in its dtype.
        optimizer_bytes: Optimizer state of the trainable parameters.
        saved_bytes: Activations kept for backward per micro-batch.
        workspace_bytes: Largest temporary memory of any layer.
        receive_buffers_bytes: One buffer per micro-batch for what comes in at either end.
        send_forward_s: For each pair of neighbouring devices (s, s + 1): time to send the
            activations of a cut in front of layer ``last``, shape (L + 1,).
        send_backward_s: Likewise for the gradients on their way back.
        limits_bytes: Usable memory of each device, `None` for no limit.
        tied: Trainable parameters used by several layers.
    """

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    forward_s: Seconds
    backward_s: Seconds
    weights_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    saved_bytes: Bytes
    workspace_bytes: Bytes
    receive_buffers_bytes: Bytes
    send_forward_s: tuple[Seconds, ...]
    send_backward_s: tuple[Seconds, ...]
    limits_bytes: tuple[int | None, ...]
    tied: tuple[Parameter, ...]

    @property
    def num_layers(self) -> int:
        return len(self.profile.layers)

    @property
    def legal_cuts(self) -> tuple[int, ...]:
        """Layers in front of which a stage may begin, ascending; never 0 or L."""
        return tuple(gap.after + 1 for gap in self.profile.boundaries if gap.legal)

    def memory(self, first: int, last: int, in_flight: int) -> MemoryUse:
        """Memory of the stage [first, last) with that many micro-batches in flight."""
        return MemoryUse(
            weights_bytes=int(self.weights_bytes[first, last]),
            gradients_bytes=int(self.gradients_bytes[first, last]),
            optimizer_bytes=int(self.optimizer_bytes[first, last]),
            activations_bytes=int(self.saved_bytes[first, last]) * in_flight,
            workspace_bytes=int(self.workspace_bytes[first, last]),
            receive_buffers_bytes=int(self.receive_buffers_bytes[first, last]),
        )

    def memory_bytes(self, in_flight: int) -> Bytes:
        """`MemoryUse.total_bytes` of every interval at once."""
        resident: Bytes = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return (
            resident
            + self.workspace_bytes
            + self.receive_buffers_bytes
            + self.saved_bytes * in_flight
        )

    def tied_sync_s(self, cuts: tuple[int, ...]) -> float:
        """Time to sum the gradients of tied weights held by several stages, one after another.

        Each is a ring over its owners, priced by the link that joins the first and the last.
        """
        total_s = 0.0
        for parameter in self.tied:
            owners = [
                stage
                for stage, (first, last) in enumerate(pairwise(cuts))
                if any(first <= layer < last for layer in parameter.layers)
            ]
            if len(owners) > 1:
                link = self.cluster.link(owners[0], owners[-1])
                total_s += link.all_reduce_time_s(parameter.size_bytes, len(owners))
        return total_s

    def stage_times(self, cuts: tuple[int, ...]) -> StageTimes:
        """What the simulator needs to know about a split."""
        spans = list(pairwise(cuts))
        inner = list(enumerate(cuts[1:-1]))
        return StageTimes(
            forward_s=[float(self.forward_s[span]) for span in spans],
            backward_s=[float(self.backward_s[span]) for span in spans],
            send_forward_s=[float(self.send_forward_s[stage][cut]) for stage, cut in inner],
            send_backward_s=[float(self.send_backward_s[stage][cut]) for stage, cut in inner],
            tied_sync_s=self.tied_sync_s(cuts),
            saved_bytes=[int(self.saved_bytes[span]) for span in spans],
        )


def stage_costs(profile: Profile, cluster: Cluster, options: PlanOptions) -> StageCosts:
    """Tables of every interval of the profile's layers.

    Raises:
        InvalidInput: Times or bytes too large to add up exactly enough.
    """
    _check_magnitude(profile, options)
    _check_links(profile, cluster, options)
    parameters = parameters_of(profile)
    learned = [entry for entry in parameters if entry.kind == "parameter" and entry.trainable]
    state = OPTIMIZER_BYTES_PER_ELEMENT[options.optimizer]
    forward = [entry.forward.median_s for entry in profile.layers]
    backward = [entry.backward.median_s for entry in profile.layers]
    loss = profile.loss
    sends = _send_times(profile, cluster)
    n = len(profile.layers)
    return StageCosts(
        profile=profile,
        cluster=cluster,
        options=options,
        forward_s=_sums(forward, loss.forward.median_s if loss else 0.0),
        backward_s=_sums(backward, loss.backward.median_s if loss else 0.0),
        weights_bytes=_held(n, ((entry.size_bytes, entry.layers) for entry in parameters)),
        gradients_bytes=_held(n, ((entry.size_bytes, entry.layers) for entry in learned)),
        optimizer_bytes=_held(n, ((entry.numel * state, entry.layers) for entry in learned)),
        saved_bytes=_saved_bytes(profile),
        workspace_bytes=_largest([entry.workspace_bytes for entry in profile.layers]),
        receive_buffers_bytes=_receive_buffers(profile, options.num_microbatches),
        send_forward_s=tuple(forward_s for forward_s, _ in sends),
        send_backward_s=tuple(backward_s for _, backward_s in sends),
        limits_bytes=tuple(
            usable_bytes(device.memory_bytes, options) for device in cluster.devices
        ),
        tied=tuple(entry for entry in learned if len(entry.layers) > 1),
    )


def usable_bytes(memory_bytes: int | None, options: PlanOptions) -> int | None:
    """The share of a device's memory that a plan may use, rounded down."""
    return None if memory_bytes is None else math.floor(memory_bytes * options.memory_fraction)


def parameters_of(profile: Profile) -> tuple[Parameter, ...]:
    """The profile's parameters; without any, one fp32 parameter a layer of `parameter_bytes`.

    Profiles written by hand often give only each layer's bytes; taking them for nothing would
    promise memory that is not there.
    """
    return profile.parameters or tuple(
        Parameter(
            names=(entry.layer.name,),
            size_bytes=entry.layer.parameter_bytes,
            numel=-(-entry.layer.parameter_bytes // 4),
            layers=(index,),
        )
        for index, entry in enumerate(profile.layers)
        if entry.layer.parameter_bytes
    )


def _sums(layer_s: list[float], loss_s: float) -> Seconds:
    """table[first, last] = sum of the layers, plus the loss where last is L.

    Each row is summed from its own start, so that no large prefix swallows a small stage.
    """
    n = len(layer_s)
    row = np.array([0.0, *layer_s])
    row[n] += loss_s
    inside = np.arange(n + 1)[None, :] > np.arange(n + 1)[:, None]
    table: Seconds = np.cumsum(np.where(inside, row[None, :], 0.0), axis=1)
    return table


def _held(num_layers: int, items: Iterable[tuple[int, tuple[int, ...]]]) -> Bytes:
    """table[first, last] = bytes of the items with at least one layer in the interval.

    The first layer of an item at or after ``first`` is ``layer`` for every first in
    (previous layer, layer], and the interval holds the item once last > layer: a rectangle,
    added at its corners and summed over both axes.
    """
    corners = np.zeros((num_layers + 2, num_layers + 1), dtype=np.int64)
    for size_bytes, layers in items:
        previous = -1
        for layer in layers:
            corners[previous + 1, layer + 1] += size_bytes
            corners[layer + 1, layer + 1] -= size_bytes
            previous = layer
    table: Bytes = corners.cumsum(axis=0).cumsum(axis=1)[: num_layers + 1]
    return table


def _saved_bytes(profile: Profile) -> Bytes:
    """Saved activations per micro-batch, by storage where the profile knows storages."""
    n = len(profile.layers)
    if profile.storages:
        table = _held(n, ((entry.size_bytes, entry.layers) for entry in profile.storages))
    else:
        layers = enumerate(profile.layers)
        table = _held(n, ((entry.saved_activation_bytes, (index,)) for index, entry in layers))
    if profile.loss:
        table[:, n] += profile.loss.saved_activation_bytes
    return table


def _largest(layer_bytes: list[int]) -> Bytes:
    """table[first, last] = largest of the layers in the interval."""
    n = len(layer_bytes)
    row = np.array([0, *layer_bytes], dtype=np.int64)
    inside = np.arange(n + 1)[None, :] > np.arange(n + 1)[:, None]
    table: Bytes = np.maximum.accumulate(np.where(inside, row[None, :], 0), axis=1)
    return table


def _receive_buffers(profile: Profile, num_microbatches: int) -> Bytes:
    """The runtime allocates, per micro-batch, what enters in front and the gradient behind."""
    gaps = profile.boundaries
    arriving = np.array([0, *(gap.forward_bytes for gap in gaps), 0], dtype=np.int64)
    returning = np.array([0, *(gap.backward_bytes for gap in gaps), 0], dtype=np.int64)
    table: Bytes = num_microbatches * (arriving[:, None] + returning[None, :])
    return table


def _send_times(profile: Profile, cluster: Cluster) -> list[tuple[Seconds, Seconds]]:
    """For each pair of neighbouring devices a plan can use; equal links share their tables."""
    gaps = profile.boundaries
    tables: dict[int, tuple[Seconds, Seconds]] = {}
    sends = []
    for device in range(min(len(cluster.devices), len(profile.layers)) - 1):
        link = cluster.link(device, device + 1)
        if id(link) not in tables:
            forward = [link.transfer_time_s(gap.forward_bytes) for gap in gaps]
            backward = [link.transfer_time_s(gap.backward_bytes) for gap in gaps]
            tables[id(link)] = (np.array([0.0, *forward, 0.0]), np.array([0.0, *backward, 0.0]))
        sends.append(tables[id(link)])
    return sends


def _check_magnitude(profile: Profile, options: PlanOptions) -> None:
    """Refuse numbers whose sums would overflow or lose bytes."""
    state = OPTIMIZER_BYTES_PER_ELEMENT[options.optimizer]
    resident = sum(entry.size_bytes * 2 + entry.numel * state for entry in parameters_of(profile))
    per_microbatch = (
        sum(entry.size_bytes for entry in profile.storages)
        + sum(entry.saved_activation_bytes for entry in profile.layers)
        + sum(gap.forward_bytes + gap.backward_bytes for gap in profile.boundaries)
        + (profile.loss.saved_activation_bytes if profile.loss else 0)
    )
    workspace = sum(entry.workspace_bytes for entry in profile.layers)
    total = resident + workspace + options.num_microbatches * per_microbatch
    if total > LARGEST_TOTAL_BYTES:
        raise InvalidInput(
            f"the profile's bytes add up to {total} over {options.num_microbatches} "
            f"micro-batches; at most {LARGEST_TOTAL_BYTES} (8 PiB) are accepted"
        )
    total_s = sum(entry.forward.median_s + entry.backward.median_s for entry in profile.layers)
    if profile.loss:
        total_s += profile.loss.forward.median_s + profile.loss.backward.median_s
    if not total_s * options.num_microbatches < LARGEST_TOTAL_S:
        raise InvalidInput(
            f"the profile's times add up to {total_s} s; less than {LARGEST_TOTAL_S:g} s over all "
            "micro-batches is accepted"
        )


def _check_links(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    """Refuse links so slow that times could become infinite."""
    num_devices = len(cluster.devices)
    for level in cluster.levels:
        per_microbatch_s = sum(
            level.transfer_time_s(gap.forward_bytes) + level.transfer_time_s(gap.backward_bytes)
            for gap in profile.boundaries
        )
        tied_s = sum(
            level.all_reduce_time_s(entry.size_bytes, num_devices)
            for entry in profile.parameters
            if len(entry.layers) > 1
        )
        total_s = per_microbatch_s * options.num_microbatches + tied_s
        if not total_s < LARGEST_TOTAL_S:
            raise InvalidInput(
                f"link level {level.name!r} would take {total_s:g} s to send what the profile "
                f"exchanges; less than {LARGEST_TOTAL_S:g} s is accepted"
            )
