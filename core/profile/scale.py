"""Micro-batch size of a profile, and scaling of a profile in proportion to another size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from ..errors import InvalidInput
from ..graph.tensors import TensorSpec
from .profile import (
    LayerProfile,
    LossProfile,
    Profile,
    SavedStorage,
    SplitLayer,
    TensorSplit,
    Timing,
)

PartT = TypeVar("PartT", LayerProfile, LossProfile)
T = TypeVar("T")


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

    def scale_tensor(found: list[TensorSpec]) -> TensorSpec:
        # The batch need not be the first dimension (attention masks, transposed activations): take
        # the first that is a multiple of it. A tensor without one does not depend on the batch.
        shape = list(found[0].shape)
        place = next((place for place, length in enumerate(shape) if length % size == 0), None)
        if place is None:
            return found[0]
        shape[place] = int(shape[place] * factor)
        return found[0].model_copy(update={"shape": tuple(shape)})

    return _scale_costs(profile, factor, scale_tensor).model_copy(
        update={
            "reconciliation": None,
            "provenance": profile.provenance.model_copy(update={"source": "estimated"}),
            "notes": (*profile.notes, _assumption(size, int(size * factor))),
        }
    )


def scale_lengths(profile: Profile, factor: Fraction) -> Profile:
    """Scale a profile to samples ``factor`` times as long, in proportion; shapes stay."""
    return _scale_costs(profile, factor, lambda found: found[0])


def _scale_costs(
    profile: Profile, factor: Fraction, tensor: Callable[[list[TensorSpec]], TensorSpec]
) -> Profile:
    ratio = float(factor)

    def scale_timing(name: str, found: list[Timing]) -> Timing:
        # Dispatching operations takes the CPU as long for any number of samples.
        if name.startswith("dispatch"):
            return found[0]
        scaled = {"median_s": found[0].median_s * ratio, "spread_s": found[0].spread_s * ratio}
        return found[0].model_copy(update=scaled)

    def scale_bytes(found: list[int]) -> int:
        return math.ceil(found[0] * factor)

    storages = tuple(
        SavedStorage(size_bytes=scale_bytes([entry.size_bytes]), layers=entry.layers)
        for entry in profile.storages
    )
    made = map_costs([profile], scale_timing, scale_bytes, tensor)
    return made.model_copy(update={"storages": storages})


def map_costs(
    profiles: Sequence[Profile],
    timing: Callable[[str, list[Timing]], Timing],
    size: Callable[[list[int]], int],
    tensor: Callable[[list[TensorSpec]], TensorSpec],
) -> Profile:
    """Return the first profile with costs and tensors computed from those of all profiles.

    The functions take what the profiles have in one place: a timing (after its field's name), bytes
    that depend on the micro-batch, or a tensor. Timings and bands that some profile lacks are left
    out; of bands the largest is taken.

    Raises:
        InvalidInput: The profiles differ in their numbers of tensors or edges.
    """

    def part(entries: Sequence[PartT]) -> PartT:
        updates: dict[str, object] = {}
        for name, first in entries[0]:
            found = [getattr(entry, name) for entry in entries]
            if isinstance(first, Timing):
                updates[name] = None if None in found else timing(name, found)
            elif name.endswith("_bytes") and isinstance(first, int):
                updates[name] = size(found)
            elif name == "error_band":
                updates[name] = None if None in found else max(found)
        return entries[0].model_copy(update=updates)

    def tensors(sequences: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
        return tuple(tensor(list(found)) for found in pair("tensors", profiles, sequences))

    losses = [profile.loss for profile in profiles if profile.loss is not None]
    return profiles[0].model_copy(
        update={
            "inputs": tensors([profile.inputs for profile in profiles]),
            "layers": tuple(
                part(entries) for entries in zip(*(one.layers for one in profiles), strict=True)
            ),
            "boundaries": tuple(
                found[0].model_copy(update={"tensors": tensors([each.tensors for each in found])})
                for found in zip(*(profile.boundaries for profile in profiles), strict=True)
            ),
            "edges": tuple(
                found[0].model_copy(update={"tensor": tensor([edge.tensor for edge in found])})
                for found in pair("edges", profiles, [profile.edges for profile in profiles])
            ),
            "loss": part(losses) if len(losses) == len(profiles) else None,
            "splits": _map_splits(profiles, size),
        }
    )


def _map_splits(
    profiles: Sequence[Profile], size: Callable[[list[int]], int]
) -> tuple[TensorSplit, ...]:
    """Return the splits that all profiles know, with bytes computed from those of all."""

    def map_layer(entries: Sequence[SplitLayer]) -> SplitLayer:
        names = [name for name in SplitLayer.model_fields if name.endswith("_bytes")]
        names.remove("parameter_bytes")
        updates = {name: size([getattr(entry, name) for entry in entries]) for name in names}
        return entries[0].model_copy(update=updates)

    known = [{split.degree: split for split in profile.splits} for profile in profiles]
    found = []
    for degree in sorted(set.intersection(*map(set, known))):
        own = [splits[degree] for splits in known]
        shared = set.intersection(*(set(split.divided) for split in own))
        found.append(
            TensorSplit(
                degree=degree,
                layers=tuple(map(map_layer, zip(*(split.layers for split in own), strict=True))),
                divided=tuple(name for name in own[0].divided if name in shared),
            )
        )
    return tuple(found)


def pair(
    what: str, profiles: Sequence[Profile], sequences: Sequence[Sequence[T]]
) -> list[tuple[T, ...]]:
    """Pair the entries of several profiles by position, where each has equally many.

    Raises:
        InvalidInput: Some profile has another number than the first.
    """
    expected = len(sequences[0])
    for position, sequence in enumerate(sequences):
        if len(sequence) == expected:
            continue
        size, other = (
            get_microbatch_size(profile) for profile in (profiles[0], profiles[position])
        )
        if size == other:
            raise InvalidInput(
                f"of the profiles at {size} samples the first has {expected} {what}, number "
                f"{position + 1} has {len(sequence)}; the model behaves differently from run to run"
            )
        raise InvalidInput(
            f"the profile at {size} samples has {expected} {what}, the one at {other} has "
            f"{len(sequence)}; the model behaves differently at the two sizes"
        )
    return list(zip(*sequences, strict=True))


def _assumption(measured: int, size: int) -> str:
    # The sentence becomes a note of the profile, and so enters its id: do not reword it lightly.
    error = "shorter" if size < measured else "longer"
    return (
        f"times and activations are ESTIMATED: scaled in proportion from micro-batches of "
        f"{measured} sample{'s' * (measured > 1)}, which were profiled, to {size}; the times are "
        f"probably {error} than they will be. A profile at {size} would tell"
    )
