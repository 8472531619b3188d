"""Interpolation of a profile at any micro-batch size from profiles at several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ..errors import InvalidInput
from ..graph.tensors import TensorSpec
from .compatibility import check_distinct, check_mergeable
from .pool import pool_profiles, total_time_s
from .profile import Profile, SavedStorage, Timing
from .scale import PartT, get_microbatch_size, map_costs, pair, scale_profile

GROWTH = "; bytes that grow faster than the number of samples are underestimated"
"""Limitation of extrapolation to larger sizes."""


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
    own = _largest_band(list(measured.values()))
    if len(sizes) == 1:
        found = scale_profile(measured[sizes[0]], Fraction(samples, sizes[0]))
        note = f"EXTRAPOLATED to {samples} samples from a profile at {sizes[0]}"
        growth = GROWTH if samples > sizes[0] else ""
        return _labelled(found, note + growth, own)
    # The two measured sizes around it, or the nearest two. The first pair that ends above serves
    # sizes below all measured ones, too.
    pairs = list(pairwise(sizes))
    low, high = next((pair for pair in pairs if samples < pair[1]), pairs[-1])
    found = _Line(low, high, samples).interpolate(measured[low], measured[high])
    inside = low < samples < high
    what = "interpolated" if inside else "EXTRAPOLATED"
    note = f"times and bytes are {what} to {samples} samples from profiles at {low} and {high}"
    # The error of interpolation was measured between sizes; beyond them it says nothing. Errors of
    # successive steps add up, assuming the worst.
    extra = _band(measured) if inside else None
    growth = GROWTH if samples > high else ""
    labelled = _labelled(found, note + growth, own)
    return labelled if extra is None else _widen(labelled, extra)


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


def _labelled(profile: Profile, note: str, band: float | None) -> Profile:
    provenance = profile.provenance.model_copy(update={"source": "estimated", "error_band": band})
    notes = (*profile.notes, note)
    return profile.model_copy(
        update={"provenance": provenance, "reconciliation": None, "notes": notes}
    )


def _widen(profile: Profile, extra: float) -> Profile:
    """Add an error to the bands of a profile and of its layers."""

    def widen(entry: PartT) -> PartT:
        if entry.error_band is None:
            return entry
        return entry.model_copy(update={"error_band": entry.error_band + extra})

    whole = (profile.provenance.error_band or 0.0) + extra
    provenance = profile.provenance.model_copy(update={"error_band": whole})
    return profile.model_copy(
        update={
            "provenance": provenance,
            "layers": tuple(map(widen, profile.layers)),
            "loss": None if profile.loss is None else widen(profile.loss),
        }
    )


def _band(measured: Mapping[int, Profile]) -> float | None:
    """Measure the largest relative error of interpolation; `None` for fewer than three sizes."""
    errors = []
    sizes = sorted(measured)
    # Leave one out: every inner size is guessed from its neighbours and compared with itself.
    for low, middle, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
        guess = _Line(low, high, middle).interpolate(measured[low], measured[high])
        exact_s = total_time_s(measured[middle])
        if exact_s:
            errors.append(abs(total_time_s(guess) / exact_s - 1))
    return max(errors, default=None)


@dataclass(frozen=True)
class _Line:
    """The line through the values at two sizes, evaluated at a third."""

    low: int
    high: int
    samples: int

    def interpolate(self, low: Profile, high: Profile) -> Profile:
        profiles = (low, high)

        def tensor(found: list[TensorSpec]) -> TensorSpec:
            lengths = pair("dimensions", profiles, [each.shape for each in found])
            shape = tuple(self.size(*each) for each in lengths)
            return found[0].model_copy(update={"shape": shape})

        def timing(_: str, found: list[Timing]) -> Timing:
            return self.timing(*found)

        # Storages of two sizes cannot be paired one by one. An interval of layers holds all
        # storages of a set or none, so their total is all that planning needs.
        totals = [_by_keepers(profile.storages) for profile in profiles]
        return map_costs(profiles, timing, lambda found: self.size(*found), tensor).model_copy(
            update={
                "storages": tuple(
                    SavedStorage(size_bytes=self.size(*(t[layers] for t in totals)), layers=layers)
                    for layers in sorted({*totals[0], *totals[1]})
                ),
                "notes": tuple(dict.fromkeys((*low.notes, *high.notes))),
            }
        )

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


def _by_keepers(storages: Sequence[SavedStorage]) -> Counter[tuple[int, ...]]:
    """Return the total size of the storages that are kept by the same set of layers."""
    found: Counter[tuple[int, ...]] = Counter()
    for storage in storages:
        found[storage.layers] += storage.size_bytes
    return found
