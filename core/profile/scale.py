"""Micro-batch size of a profile, and scaling of a profile in proportion to another size."""

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
    """Return the samples of a profile's micro-batch: the first dimension of its first input.

    Raises:
        InvalidInput: The profile lists no such input.
    """
    if not profile.inputs or not profile.inputs[0].shape or not profile.inputs[0].shape[0]:
        raise InvalidInput(
            "batch_size needs a profile with a known micro-batch size (the first dimension of its "
            "first input), which this profile does not list; profile again, or give "
            "num_microbatches",
            field="/options/batch_size",
        )
    return profile.inputs[0].shape[0]


def scale_profile(profile: Profile, factor: Fraction) -> Profile:
    """Scale a profile to micro-batches ``factor`` times as large, in proportion.

    Times, activations, workspace, boundaries and the loss are scaled, bytes rounded up; parameters
    are not. Small micro-batches use a device less efficiently, so scaled-down times are optimistic
    and scaled-up times pessimistic: the result is an estimate.

    Raises:
        InvalidInput: The profile's size is unknown, or the new one is not an integer.
    """
    if factor == 1:
        return profile
    size = get_microbatch_size(profile)
    if (size * factor).denominator != 1:
        raise InvalidInput(f"{factor} of {size} samples is not a whole number of samples")
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
    """Return the timings of a layer or the loss, by field."""
    return {name: found for name, found in entry if isinstance(found, Timing)}


def list_sizes(entry: LayerProfile | LossProfile) -> dict[str, int]:
    """Return the sizes that depend on the micro-batch, by field."""
    return {
        name: found for name, found in entry if name.endswith("_bytes") and isinstance(found, int)
    }


def _assumption(measured: int, size: int) -> str:
    # The sentence becomes a note of the profile, and so enters its id: do not reword it lightly.
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
        # The batch need not be the first dimension (attention masks, transposed activations): take
        # the first that is a multiple of it. A tensor without one does not depend on the batch.
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
        # Dispatching operations takes the CPU as long for any number of samples.
        return {
            name: self.timing(found)
            for name, found in list_timings(entry).items()
            if not name.startswith("dispatch")
        }

    def _sizes(self, entry: LayerProfile | LossProfile) -> dict[str, int]:
        return {name: self.size(found) for name, found in list_sizes(entry).items()}

    def loss(self, loss: LossProfile) -> LossProfile:
        return loss.model_copy(update={**self._timings(loss), **self._sizes(loss)})
