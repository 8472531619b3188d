"""Backward passes in two parts: gradients of inputs, which earlier stages wait for, and of weights.

Schedules that split the backward take both as they were measured. Where not, each is half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .profile import LayerProfile, Profile


def has_parts(profile: Profile) -> bool:
    """Return True if the parts of some layer were measured apart."""
    return any(entry.backward_input and entry.backward_weight for entry in profile.layers)


def layer_parts_s(entry: LayerProfile) -> tuple[float, float]:
    """Return the time of a layer's parts, halves of its backward where they were not measured."""
    if entry.backward_input is None or entry.backward_weight is None:
        return entry.backward.median_s / 2, entry.backward.median_s / 2
    return entry.backward_input.median_s, entry.backward_weight.median_s


def stage_parts_s(
    profile: Profile, layers: Sequence[int], *, recompute: bool = False
) -> tuple[float, float]:
    """Return the time of both parts of a stage.

    What is computed again, and the loss, belong to the first where parts were measured.
    """
    entries = [profile.layers[layer] for layer in layers]
    parts = [layer_parts_s(entry) for entry in entries]
    inputs_s, weights_s = (math.fsum(column) for column in zip(*parts, strict=True))
    more_s = math.fsum(entry.forward.median_s for entry in entries) if recompute else 0.0
    if profile.loss and len(profile.layers) - 1 in layers:
        more_s += profile.loss.backward.median_s
    if has_parts(profile):
        return inputs_s + more_s, weights_s
    return inputs_s + more_s / 2, weights_s + more_s / 2


def microbatch_s(profile: Profile, *, splits: bool) -> tuple[float, float]:
    """Return the work of one micro-batch, and the least of it that runs through all layers."""
    loss_s = profile.loss.backward.median_s if profile.loss else 0.0
    forward_s = math.fsum(entry.forward.median_s for entry in profile.layers)
    forward_s += profile.loss.forward.median_s if profile.loss else 0.0
    if not splits:
        backward_s = math.fsum(entry.backward.median_s for entry in profile.layers) + loss_s
        return forward_s + backward_s, forward_s + backward_s
    inputs_s, weights_s = stage_parts_s(profile, range(len(profile.layers)))
    return forward_s + inputs_s + weights_s, forward_s + inputs_s


def describe_assumed(profile: Profile) -> str | None:
    """Return a note on layers whose backward is taken to have equal halves, if there are any."""
    timed = [entry for entry in profile.layers if entry.backward.median_s]
    lacking = [entry for entry in timed if not (entry.backward_input and entry.backward_weight)]
    if not lacking:
        return None
    return (
        f"halves of the backward are assumed for {len(lacking)} of {len(timed)} layers: the "
        "profile does not have the times of its two parts"
    )
