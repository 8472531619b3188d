"""View of a profile besides its layers: its quality, and its changes to another."""

from __future__ import annotations

from ..core.document import Record
from ..core.profile.diff import LayerChange, ProfileDiff
from ..core.profile.profile import Profile
from ..core.profile.table import format_basis, format_quality
from ..core.units import count

NOISY = 0.25
"""A spread of more than this share of a time is remarked upon."""


class ChangeColumns(Record):
    """A profile beside an earlier one; each field has an entry a layer, the last is all of them.

    Attributes:
        relative: Of forward and backward together, 0.1 for ten percent more; `None` where there
            was nothing before.
        significant: Whether one of both times changed by more than it spreads; `None` where no
            spread is known.
    """

    names: tuple[str, ...]
    forward_before_s: tuple[float, ...]
    forward_after_s: tuple[float, ...]
    backward_before_s: tuple[float, ...]
    backward_after_s: tuple[float, ...]
    relative: tuple[float | None, ...]
    significant: tuple[bool | None, ...]


def changes_of(found: ProfileDiff) -> ChangeColumns:
    """Transpose the rows of ``stagewright diff`` into columns."""
    rows: tuple[LayerChange, ...] = (*found.layers, found.total)
    return ChangeColumns(
        names=tuple(row.name for row in rows),
        forward_before_s=tuple(row.forward.before_s for row in rows),
        forward_after_s=tuple(row.forward.after_s for row in rows),
        backward_before_s=tuple(row.backward.before_s for row in rows),
        backward_after_s=tuple(row.backward.after_s for row in rows),
        relative=tuple(row.time.relative for row in rows),
        significant=tuple(row.time.significant for row in rows),
    )


def describe_quality(profile: Profile) -> tuple[str, ...]:
    """Describe how far the numbers can be trusted, one sentence per aspect."""
    provenance = profile.provenance
    lines = [*format_basis(profile), *format_quality(profile)]
    noisy = [
        entry.layer.name
        for entry in profile.layers
        for timing in [max((entry.forward, entry.backward), key=lambda one: one.median_s)]
        if timing.spread_s > NOISY * timing.median_s
    ]
    if noisy:
        named = ", ".join(noisy[:3]) + (" and others" if len(noisy) > 3 else "")
        lines.append(
            f"times spread by more than {NOISY:.0%} in {count(len(noisy), 'layer')}: {named}; "
            "measure again with a larger budget"
        )
    if provenance.busy_neighbours:
        lines.append(
            f"{count(provenance.busy_neighbours, 'other process')} kept the machine busy meanwhile"
        )
    if provenance.source == "estimated" and provenance.error_band is None:
        lines.append("estimated; its error has not been measured")
    return tuple(lines)
