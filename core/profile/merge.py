"""Profiles of one model at several micro-batch sizes as one profile at any size."""

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
"""What lines above the measured sizes leave out."""

PartT = TypeVar("PartT", LayerProfile, LossProfile)
_T = TypeVar("_T")


def merge(
    profiles: Sequence[Profile], *, samples: int | None = None, names: Sequence[str] = ()
) -> Profile:
    """One profile from several of the same model, device and settings.

    Profiles of the same micro-batch size are pooled (`pool_profiles`). Times at a size in between
    are those of the line between the nearest measured sizes, and so are bytes, rounded up: exact
    where bytes are so much per sample and so much besides. Beyond the measured sizes the line of
    the two nearest goes on, but nothing shrinks with more samples, and below the smallest nothing
    is less than in proportion. With one size alone everything is in proportion (`scale_profile`).

    Where three sizes or more were measured, the error to expect is measured too: each size in
    between is interpolated from its neighbours and compared with what was measured there. It adds
    to the error the profiles have themselves, where they are estimates.

    Args:
        profiles: At least one.
        samples: Of the micro-batch; `None` if all profiles have the same size, which it is.
        names: Of the profiles, for messages.

    Returns:
        A profile that says it is measured only if the size itself was.

    Raises:
        InvalidInput: There is none, one is there twice, they differ in more than their size, or
            no size is named.
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
                f"the profiles are of micro-batches of {_listed(measured)} samples; say of how "
                "many the merged one is to be (--microbatch)"
            )
        (samples,) = measured
    if samples < 1:
        raise InvalidInput(f"a micro-batch has at least one sample, not {samples}")
    return profile_at_size(measured, samples)


def profile_at_size(measured: Mapping[int, Profile], samples: int) -> Profile:
    """The profile at one size; see `merge`.

    Args:
        measured: By size, ascending.
        samples: The size wanted.
    """
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
    return _labelled(found, note, _sum_of(own, _band(measured) if inside else None))


def _pooled(profiles: Sequence[Profile]) -> Profile:
    """Pooled, with the largest error any of them has."""
    found, band = pool_profiles(profiles), _largest_band(profiles)
    if band == found.provenance.error_band:
        return found
    provenance = found.provenance.model_copy(update={"error_band": band})
    return found.model_copy(update={"provenance": provenance})


def _largest_band(profiles: Sequence[Profile]) -> float | None:
    """Of the profiles' own errors."""
    bands = [entry.provenance.error_band for entry in profiles]
    return max((band for band in bands if band is not None), default=None)


def _sum_of(*bands: float | None) -> float | None:
    """Errors of one thing after another, on the safe side; `None` if none is known."""
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
    """Largest relative error of the whole time where it can be checked; `None` for two sizes."""
    errors = []
    sizes = sorted(measured)
    for low, middle, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
        guess = _Line(low, high, middle).profile(measured[low], measured[high])
        exact = measured[middle]
        exact_s = total_time_s(exact.layers, exact.loss)
        if exact_s:
            errors.append(abs(total_time_s(guess.layers, guess.loss) / exact_s - 1))
    return max(errors) if errors else None


def _nearest(sizes: Sequence[int], samples: int) -> tuple[int, int]:
    """The measured sizes on both sides, or the two nearest on one."""
    pairs = list(pairwise(sizes))
    for low, high in pairs:
        if samples < high:
            return low, high
    return pairs[-1]


@dataclass(frozen=True)
class _Line:
    """The line through two sizes, at a third."""

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
        """Bytes, or a length of a tensor; exact for lines, rounded up."""
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
        """Storages kept by the same layers count together: an interval holds all or none."""
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
        """Pairs of what both sizes have.

        Raises:
            InvalidInput: They do not have equally many: the model does something else.
        """
        if len(one) != len(other):
            raise InvalidInput(
                f"the profile at {self.low} samples has {len(one)} {what} where the one at "
                f"{self.high} has {len(other)}; the model does not do the same at both sizes"
            )
        return list(zip(one, other, strict=True))


def _by_keepers(storages: Sequence[SavedStorage]) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for storage in storages:
        found[storage.layers] = found.get(storage.layers, 0) + storage.size_bytes
    return found


def _listed(sizes: Mapping[int, Profile]) -> str:
    return " and ".join(map(str, sizes))
