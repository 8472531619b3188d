"""Interpolation of a profile at any micro-batch size from profiles at several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeVar

from ..errors import InvalidInput
from ..graph.tensors import TensorSpec
from .compatibility import check_distinct, check_mergeable
from .pool import pool_profiles, total_time_s
from .profile import LayerProfile, LossProfile, Profile, SavedStorage, Timing
from .scale import get_microbatch_size, list_sizes, list_timings, scale_profile

GROWTH = "; bytes that grow faster than the number of samples are underestimated"
"""Limitation of extrapolation to larger sizes."""

PartT = TypeVar("PartT", LayerProfile, LossProfile)
_T = TypeVar("_T")


def merge(
    profiles: Sequence[Profile], *, samples: int | None = None, names: Sequence[str] = ()
) -> Profile:
    """Merge profiles of one model, device and set of settings into one at a given size.

    Profiles of equal micro-batch size are pooled (`pool_profiles`). Between measured sizes, times
    and bytes (rounded up) are interpolated linearly from the two nearest, which is exact for bytes
    that are a constant plus a multiple of the samples. Beyond them the line of the two nearest is
    extrapolated, but nothing shrinks with more samples, and below the smallest size nothing falls
    faster than in proportion. A single size is scaled in proportion (`scale_profile`).

    With three or more sizes the expected error is measured, too: each size in between is
    interpolated from its neighbours and compared with its own measurement. It is added to the
    error of the profiles themselves, if they are estimates.

    Args:
        profiles: At least one.
        samples: Micro-batch size; may be `None` if all profiles have the same.
        names: Names of the profiles, for messages.

    Returns:
        A profile marked as measured only if that very size was measured.

    Raises:
        InvalidInput: There are no profiles, two are equal, they differ in more than their size, or
            ``samples`` is missing.
    """
    if not profiles:
        raise InvalidInput("name at least one profile to merge")
    names = names or [f"profile {index}" for index in range(len(profiles))]
    check_distinct(profiles, names)
    check_mergeable(profiles, names)
    by_size: dict[int, list[Profile]] = {}
    for profile in profiles:
        by_size.setdefault(get_microbatch_size(profile), []).append(profile)
    measured = {size: _pooled(by_size[size]) for size in sorted(by_size)}
    if samples is None:
        if len(measured) > 1:
            raise InvalidInput(
                f"the profiles have micro-batches of {' and '.join(map(str, measured))} samples; "
                "give the size of the merged one (--microbatch)"
            )
        (samples,) = measured
    if samples < 1:
        raise InvalidInput(f"a micro-batch needs at least one sample, not {samples}")
    return profile_at_size(measured, samples)


def profile_at_size(measured: Mapping[int, Profile], samples: int) -> Profile:
    """Return the profile at one size from profiles by ascending size; see `merge`."""
    if samples in measured:
        return measured[samples]
    sizes = sorted(measured)
    if len(sizes) == 1:
        found = scale_profile(measured[sizes[0]], Fraction(samples, sizes[0]))
        note = f"EXTRAPOLATED to {samples} samples from a profile at {sizes[0]}"
        if samples > sizes[0]:
            note += GROWTH
        return _labelled(found, note, _sum_of(_largest_band(list(measured.values()))))
    low, high = _nearest(sizes, samples)
    found = _Line(low, high, samples).profile(measured[low], measured[high])
    inside = low < samples < high
    what = "interpolated" if inside else "EXTRAPOLATED"
    note = f"times and bytes are {what} to {samples} samples from profiles at {low} and {high}"
    if samples > high:
        note += GROWTH
    own = _largest_band(list(measured.values()))
    # The error of interpolation was measured between sizes; beyond them it says nothing.
    return _labelled(found, note, _sum_of(own, _band(measured) if inside else None))


def _pooled(profiles: Sequence[Profile]) -> Profile:
    """Pool profiles, keeping the largest expected error."""
    found, band = pool_profiles(profiles), _largest_band(profiles)
    if band == found.provenance.error_band:
        return found
    provenance = found.provenance.model_copy(update={"error_band": band})
    return found.model_copy(update={"provenance": provenance})


def _largest_band(profiles: Sequence[Profile]) -> float | None:
    bands = [entry.provenance.error_band for entry in profiles]
    return max((band for band in bands if band is not None), default=None)


def _sum_of(*bands: float | None) -> float | None:
    """Add errors of successive steps, assuming the worst; return `None` if none is known."""
    known = [band for band in bands if band is not None]
    return sum(known) if known else None


def _labelled(profile: Profile, note: str, band: float | None) -> Profile:
    provenance = profile.provenance.model_copy(update={"source": "estimated", "error_band": band})
    return profile.model_copy(
        update={
            "provenance": provenance,
            "reconciliation": None,
            "notes": (*profile.notes, note),
        }
    )


def _band(measured: Mapping[int, Profile]) -> float | None:
    """Measure the largest relative error of interpolation; `None` for fewer than three sizes."""
    errors = []
    sizes = sorted(measured)
    # Leave one out: every inner size is guessed from its neighbours and compared with itself.
    for low, middle, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
        guess = _Line(low, high, middle).profile(measured[low], measured[high])
        exact = measured[middle]
        exact_s = total_time_s(exact.layers, exact.loss)
        if exact_s:
            errors.append(abs(total_time_s(guess.layers, guess.loss) / exact_s - 1))
    return max(errors) if errors else None


def _nearest(sizes: Sequence[int], samples: int) -> tuple[int, int]:
    """Return the measured sizes on both sides, or the two nearest on one side."""
    pairs = list(pairwise(sizes))
    # The first pair that ends above serves sizes below all measured ones, too.
    for low, high in pairs:
        if samples < high:
            return low, high
    return pairs[-1]


@dataclass(frozen=True)
class _Line:
    """The line through the values at two sizes, evaluated at a third."""

    low: int
    high: int
    samples: int

    def profile(self, low: Profile, high: Profile) -> Profile:
        loss = self.part(low.loss, high.loss) if low.loss and high.loss else None
        return low.model_copy(
            update={
                "inputs": self.tensors(low.inputs, high.inputs),
                "layers": tuple(
                    self.part(one, other)
                    for one, other in zip(low.layers, high.layers, strict=True)
                ),
                "boundaries": tuple(
                    one.model_copy(update={"tensors": self.tensors(one.tensors, other.tensors)})
                    for one, other in zip(low.boundaries, high.boundaries, strict=True)
                ),
                "edges": tuple(
                    one.model_copy(update={"tensor": self.tensor(one.tensor, other.tensor)})
                    for one, other in self.same_many("edges", low.edges, high.edges)
                ),
                "storages": self.storages(low.storages, high.storages),
                "loss": loss,
                "notes": tuple(dict.fromkeys((*low.notes, *high.notes))),
            }
        )

    def part(self, one: PartT, other: PartT) -> PartT:
        timed, sized = list_timings(other), list_sizes(other)
        updates: dict[str, object] = {
            name: self.timing(found, timed[name]) if name in timed else None
            for name, found in list_timings(one).items()
        }
        updates |= {name: self.size(found, sized[name]) for name, found in list_sizes(one).items()}
        return one.model_copy(update=updates)

    def timing(self, one: Timing, other: Timing) -> Timing:
        share = (self.samples - self.low) / (self.high - self.low)
        time_s = one.median_s + share * (other.median_s - one.median_s)
        # Outside the measured range a noisy slope could yield negative or falling times: bound
        # them below by proportion, and by the nearest measurement.
        if self.samples < self.low:
            time_s = min(max(time_s, one.median_s * self.samples / self.low), one.median_s)
        elif self.samples > self.high:
            time_s = max(time_s, other.median_s)
        nearer = one if abs(self.samples - self.low) < abs(self.high - self.samples) else other
        relative = nearer.spread_s / nearer.median_s if nearer.median_s else 0.0
        return Timing(
            median_s=time_s, spread_s=time_s * relative, repeats=min(one.repeats, other.repeats)
        )

    def size(self, one: int, other: int) -> int:
        """Evaluate the line for bytes or a tensor's length, rounding up."""
        # Fractions: floating-point error would round an exact byte count up by one.
        share = Fraction(self.samples - self.low, self.high - self.low)
        exact = one + share * (other - one)
        if self.samples < self.low:
            exact = max(exact, Fraction(one * self.samples, self.low))
        elif self.samples > self.high:
            exact = max(exact, Fraction(other))
        return math.ceil(exact)

    def storages(
        self, one: Sequence[SavedStorage], other: Sequence[SavedStorage]
    ) -> tuple[SavedStorage, ...]:
        """Interpolate the total size of the storages that are kept by the same set of layers."""
        # Storages of two sizes cannot be paired one by one. An interval of layers holds all
        # storages of a set or none, so their total is all that planning needs.
        totals = [_by_keepers(one), _by_keepers(other)]
        keepers = sorted({*totals[0], *totals[1]})
        return tuple(
            SavedStorage(
                size_bytes=self.size(totals[0].get(layers, 0), totals[1].get(layers, 0)),
                layers=layers,
            )
            for layers in keepers
        )

    def tensors(
        self, one: Sequence[TensorSpec], other: Sequence[TensorSpec]
    ) -> tuple[TensorSpec, ...]:
        pairs = self.same_many("tensors", one, other)
        return tuple(self.tensor(before, after) for before, after in pairs)

    def tensor(self, one: TensorSpec, other: TensorSpec) -> TensorSpec:
        shape = tuple(
            self.size(before, after)
            for before, after in self.same_many("dimensions", one.shape, other.shape)
        )
        return one.model_copy(update={"shape": shape})

    def same_many(self, what: str, one: Sequence[_T], other: Sequence[_T]) -> list[tuple[_T, _T]]:
        """Pair the elements at both sizes.

        Raises:
            InvalidInput: Their numbers differ, so the model behaves differently.
        """
        if len(one) != len(other):
            raise InvalidInput(
                f"the profile at {self.low} samples has {len(one)} {what}, the one at {self.high} "
                f"has {len(other)}; the model behaves differently at the two sizes"
            )
        return list(zip(one, other, strict=True))


def _by_keepers(storages: Sequence[SavedStorage]) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for storage in storages:
        found[storage.layers] = found.get(storage.layers, 0) + storage.size_bytes
    return found
