"""Pooling of repeated profiles into one, with medians of their medians."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TypeVar

from .profile import LayerProfile, LossProfile, Profile, Reconciliation, Timing
from .scale import list_sizes, list_timings

PartT = TypeVar("PartT", LayerProfile, LossProfile)


def pool_profiles(profiles: Sequence[Profile]) -> Profile:
    """Pool profiles of one model and micro-batch size.

    A time is the median of the profiles' medians; its spread is the larger of their median spread
    and the interquartile range of the medians. Bytes are the largest of all profiles.

    Args:
        profiles: At least one; see `compatibility.check_mergeable`.
    """
    if len(profiles) == 1:
        return profiles[0]
    first = profiles[0]
    layers = tuple(
        _part(entries) for entries in zip(*(profile.layers for profile in profiles), strict=True)
    )
    losses = [profile.loss for profile in profiles if profile.loss is not None]
    loss = _part(losses) if losses else None
    # All storages of one profile, the largest: those of different runs cannot be paired.
    most = max(profiles, key=lambda profile: sum(one.size_bytes for one in profile.storages))
    return first.model_copy(
        update={
            "layers": layers,
            "loss": loss,
            "storages": most.storages,
            "reconciliation": _reconciled(profiles, layers, loss),
            "notes": (*_notes(profiles), f"pooled from {len(profiles)} profiles"),
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


def total_time_s(layers: Sequence[LayerProfile], loss: LossProfile | None) -> float:
    """Return the time of forward and backward over all layers and the loss."""
    parts: list[LayerProfile | LossProfile] = [*layers, *([loss] if loss else [])]
    return sum(part.forward.median_s + part.backward.median_s for part in parts)


def _part(entries: Sequence[PartT]) -> PartT:
    """Pool one layer, or the loss, leaving out what some profiles did not time."""
    timed = [list_timings(entry) for entry in entries]
    sized = [list_sizes(entry) for entry in entries]
    updates: dict[str, object] = {
        name: pool_timings([each[name] for each in timed])
        if all(name in each for each in timed)
        else None
        for name in timed[0]
    }
    updates |= {name: max(each[name] for each in sized) for name in sized[0]}
    return entries[0].model_copy(update=updates)


def _reconciled(
    profiles: Sequence[Profile], layers: Sequence[LayerProfile], loss: LossProfile | None
) -> Reconciliation | None:
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
            "relative_error": total_time_s(layers, loss) / whole_s - 1 if whole_s else 0.0,
        }
    )


def _notes(profiles: Sequence[Profile]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for profile in profiles for note in profile.notes))
