"""How many samples a profile is of, and the profile in proportion to another number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import InvalidInput
from ..graph.graph import Boundary
from ..graph.tensors import TensorSpec
from .profile import LayerProfile, LossProfile, Profile, SavedStorage, Timing


def get_microbatch_size(profile: Profile) -> int:
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


def scale_profile(profile: Profile, factor: Fraction) -> Profile:
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
    size = get_microbatch_size(profile)
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


def list_timings(entry: LayerProfile | LossProfile) -> dict[str, Timing]:
    """What was timed, by field."""
    return {name: found for name, found in entry if isinstance(found, Timing)}


def list_sizes(entry: LayerProfile | LossProfile) -> dict[str, int]:
    """Bytes that depend on the micro-batch, by field."""
    return {
        name: found for name, found in entry if name.endswith("_bytes") and isinstance(found, int)
    }


def _assumption(measured: int, size: int) -> str:
    """What `scale_profile` takes for granted, and which way that errs."""
    error = "shorter" if size < measured else "longer"
    return (
        f"times and activations are ESTIMATED: scaled in proportion from micro-batches of "
        f"{measured} sample{'s' * (measured > 1)}, which were profiled, to {size}; the times are "
        f"probably {error} than they will be. A profile at {size} would tell"
    )


@dataclass(frozen=True)
class _Scale:
    """See `scale_profile`."""

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
        return entry.model_copy(update={**self._timings(entry), **self._sizes(entry)})

    def _timings(self, entry: LayerProfile | LossProfile) -> dict[str, Timing]:
        """Issuing operations takes the CPU as long for any number of samples."""
        return {
            name: self.timing(found)
            for name, found in list_timings(entry).items()
            if not name.startswith("dispatch")
        }

    def _sizes(self, entry: LayerProfile | LossProfile) -> dict[str, int]:
        return {name: self.size(found) for name, found in list_sizes(entry).items()}

    def loss(self, loss: LossProfile) -> LossProfile:
        return loss.model_copy(update={**self._timings(loss), **self._sizes(loss)})
