"""Pooling of repeated profiles into one, with medians of their medians."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from .profile import LayerProfile, LossProfile, Profile, Reconciliation, Timing
from .scale import map_costs


def pool_profiles(profiles: Sequence[Profile]) -> Profile:
    """Pool profiles of one model and micro-batch size.

    A time is the median of the profiles' medians; its spread is the larger of their median spread
    and the interquartile range of the medians. Bytes are the largest of all profiles.
    """
    if len(profiles) == 1:
        return profiles[0]
    pooled = map_costs(profiles, lambda _, found: pool_timings(found), max, lambda found: found[0])
    # All storages of one profile, the largest: those of different runs cannot be paired.
    most = max(profiles, key=lambda profile: sum(one.size_bytes for one in profile.storages))
    notes = dict.fromkeys(note for profile in profiles for note in profile.notes)
    return pooled.model_copy(
        update={
            "storages": most.storages,
            "reconciliation": _reconciled(profiles, pooled),
            "notes": (*notes, f"pooled from {len(profiles)} profiles"),
        }
    )


def pool_timings(timings: Sequence[Timing]) -> Timing:
    """Pool timings; see `pool_profiles`."""
    medians = [timing.median_s for timing in timings]
    between_s = 0.0
    if len(medians) > 1:
        # Inclusive, because the default extrapolates beyond the smallest and largest of few values.
        low_s, _, high_s = quantiles(medians, n=4, method="inclusive")
        between_s = high_s - low_s
    return Timing(
        median_s=median(medians),
        spread_s=max(between_s, median(timing.spread_s for timing in timings)),
        repeats=sum(timing.repeats for timing in timings),
    )


def total_time_s(profile: Profile) -> float:
    """Return the time of forward and backward over all layers and the loss."""
    parts: list[LayerProfile | LossProfile] = [*profile.layers]
    parts += [profile.loss] if profile.loss else []
    return sum(part.forward.median_s + part.backward.median_s for part in parts)


def _reconciled(profiles: Sequence[Profile], pooled: Profile) -> Reconciliation | None:
    found = [profile.reconciliation for profile in profiles if profile.reconciliation]
    # The pooled layers come from all profiles, so their comparison with the whole must, too.
    if len(found) < len(profiles):
        return None
    forward = pool_timings([entry.whole_forward for entry in found])
    backward = pool_timings([entry.whole_backward for entry in found])
    whole_s = forward.median_s + backward.median_s
    return found[0].model_copy(
        update={
            "whole_forward": forward,
            "whole_backward": backward,
            "relative_error": total_time_s(pooled) / whole_s - 1 if whole_s else 0.0,
        }
    )
