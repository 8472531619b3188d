"""A profile as plain text: one row a layer, then what the numbers are worth."""

from __future__ import annotations

from ..core.profile import LayerProfile, Profile
from ..core.text_table import text_table
from ..core.units import count, format_bytes, format_time

HEADINGS = ("layer", "forward", "backward", "parameters", "activations")


UNRELIABLE = 0.25
"""Sums of layers further than this from the whole model are remarked upon."""


def profile_table(profile: Profile) -> str:
    """What ``stagewright profile`` and ``stagewright show`` print."""
    rows = [HEADINGS, *map(_row, profile.layers), _total(profile)]
    return "\n".join([text_table(rows), "", *_summary(profile)])


def _row(entry: LayerProfile) -> tuple[str, ...]:
    return (
        entry.layer.name,
        format_time(entry.forward.median_s),
        format_time(entry.backward.median_s),
        format_bytes(entry.layer.parameter_bytes),
        format_bytes(entry.saved_activation_bytes),
    )


def _total(profile: Profile) -> tuple[str, ...]:
    """Sums in which tied weights and shared storages count once, unlike a sum of the rows."""
    parameters = sum(
        entry.size_bytes for entry in profile.parameters if entry.kind == "parameter"
    ) or sum(entry.layer.parameter_bytes for entry in profile.layers)
    activations = sum(storage.size_bytes for storage in profile.storages) or sum(
        entry.saved_activation_bytes for entry in profile.layers
    )
    return (
        count(len(profile.layers), "layer"),
        format_time(sum(entry.forward.median_s for entry in profile.layers)),
        format_time(sum(entry.backward.median_s for entry in profile.layers)),
        format_bytes(parameters),
        format_bytes(activations),
    )


def _summary(profile: Profile) -> list[str]:
    provenance = profile.provenance
    device = provenance.device_name or provenance.device
    lines = [f"{provenance.source.upper()} {profile.model} on {device}, one micro-batch"]
    if provenance.error_band is not None:
        lines.append(f"expect an error of {provenance.error_band:.1%}")
    whole = profile.reconciliation
    if whole is not None:
        time_s = whole.whole_forward.median_s + whole.whole_backward.median_s
        lines.append(
            f"the whole model took {format_time(time_s)}; "
            f"the sum of its layers differs by {whole.relative_error:+.1%}"
        )
        if abs(whole.relative_error) > UNRELIABLE:
            lines.append(
                "that is much: other work on this machine, or layers too small to time; "
                "measure again, with a larger --budget or a larger micro-batch"
            )
    return [*lines, *profile.notes]
