"""A profile at another micro-batch size than it was measured at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..core.errors import InvalidInput
from ..core.graph import Boundary
from ..core.plan import Plan
from ..core.profile import LayerProfile, LossProfile, Profile, SavedStorage, Timing
from ..core.tensors import TensorSpec


def size_of(profile: Profile) -> int:
    """Samples of the profile's micro-batch: the first dimension of its first input.

    Raises:
        InvalidInput: It lists no input with a dimension.
    """
    if not profile.inputs or not profile.inputs[0].shape or not profile.inputs[0].shape[0]:
        raise InvalidInput(
            "batch_size needs a profile that says how many samples its micro-batch has: the first "
            "dimension of its first input, and this profile lists none; profile again, or ask for "
            "num_microbatches",
            field="/options/batch_size",
        )
    return profile.inputs[0].shape[0]


def scaled(profile: Profile, factor: Fraction) -> Profile:
    """The profile of micro-batches ``factor`` times as large, if everything grows with samples.

    Times, activations, workspace, what crosses boundaries and the loss's share are scaled, bytes
    rounded up; parameters are not. Small micro-batches keep a device less busy than that, so
    times scaled down are too good and times scaled up too bad: the result is an estimate. A
    tensor is scaled in its first dimension that is a multiple of the profile's size; one without
    any does not change.

    Raises:
        InvalidInput: The profile says nothing about its size, or the new one is no whole number.
    """
    if factor == 1:
        return profile
    size = size_of(profile)
    if (size * factor).denominator != 1:
        raise InvalidInput(f"{factor} times micro-batches of {size} samples are no whole samples")
    scale = _Scale(size, factor)
    loss = profile.loss
    return profile.model_copy(
        update={
            "inputs": scale.tensors(profile.inputs),
            "layers": tuple(scale.layer(entry) for entry in profile.layers),
            "boundaries": tuple(scale.boundary(entry) for entry in profile.boundaries),
            "edges": tuple(
                edge.model_copy(update={"tensor": scale.tensor(edge.tensor)})
                for edge in profile.edges
            ),
            "storages": tuple(
                SavedStorage(size_bytes=scale.size(entry.size_bytes), layers=entry.layers)
                for entry in profile.storages
            ),
            "loss": loss and scale.loss(loss),
            "reconciliation": None,
            "provenance": profile.provenance.model_copy(update={"source": "estimated"}),
            "notes": (*profile.notes, _assumption(size, int(size * factor))),
        }
    )


def _assumption(measured: int, size: int) -> str:
    """What `scaled` takes for granted, and which way that errs."""
    error = "shorter" if size < measured else "longer"
    return (
        f"times and activations are ESTIMATED: scaled in proportion from micro-batches of "
        f"{measured} sample{'s' * (measured > 1)}, which were profiled, to {size}; the times are "
        f"probably {error} than they will be. A profile at {size} would tell"
    )


def as_planned(plan: Plan, profile: Profile) -> Profile:
    """The profile at the micro-batch size of a plan that was free to choose it."""
    if plan.options.batch_size is None or not plan.inputs or not profile.inputs:
        return profile
    before, after = profile.inputs[0].shape, plan.inputs[0].shape
    if not before or not after or not before[0] or not after[0]:
        return profile
    return scaled(profile, Fraction(after[0], before[0]))


@dataclass(frozen=True)
class _Scale:
    """See `scaled`."""

    batch: int
    factor: Fraction

    def size(self, size_bytes: int) -> int:
        return math.ceil(size_bytes * self.factor)

    def timing(self, timing: Timing) -> Timing:
        ratio = float(self.factor)
        return timing.model_copy(
            update={"median_s": timing.median_s * ratio, "spread_s": timing.spread_s * ratio}
        )

    def tensors(self, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(self.tensor(tensor) for tensor in tensors)

    def tensor(self, tensor: TensorSpec) -> TensorSpec:
        for place, length in enumerate(tensor.shape):
            if length % self.batch == 0:
                longer = int(length * self.factor)
                shape = (*tensor.shape[:place], longer, *tensor.shape[place + 1 :])
                return tensor.model_copy(update={"shape": shape})
        return tensor

    def boundary(self, boundary: Boundary) -> Boundary:
        return boundary.model_copy(update={"tensors": self.tensors(boundary.tensors)})

    def layer(self, entry: LayerProfile) -> LayerProfile:
        parts = (entry.backward_input, entry.backward_weight)
        return LayerProfile(
            layer=entry.layer,
            forward=self.timing(entry.forward),
            backward=self.timing(entry.backward),
            backward_input=parts[0] and self.timing(parts[0]),
            backward_weight=parts[1] and self.timing(parts[1]),
            saved_activation_bytes=self.size(entry.saved_activation_bytes),
            output_bytes=self.size(entry.output_bytes),
            workspace_bytes=self.size(entry.workspace_bytes),
        )

    def loss(self, loss: LossProfile) -> LossProfile:
        return LossProfile(
            forward=self.timing(loss.forward),
            backward=self.timing(loss.backward),
            saved_activation_bytes=self.size(loss.saved_activation_bytes),
        )
