"""Layer-by-layer difference of two profiles, e.g. of two devices, commits or settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from ..document import Record
from ..errors import InvalidInput
from .compatibility import compare, setting_differences
from .profile import LayerProfile, Profile, Timing


class TimeChange(Record):
    """A time before and after.

    Attributes:
        significant: Whether the difference exceeds the larger of both interquartile ranges;
            `None` if neither is known, as in estimates.
    """

    before_s: float = Field(ge=0)
    after_s: float = Field(ge=0)
    significant: bool | None = None

    @property
    def relative(self) -> float | None:
        """Return (after - before) / before; `None` for an increase from 0."""
        return _relative(self.before_s, self.after_s)


class SizeChange(Record):
    """Bytes before and after."""

    before_bytes: int = Field(ge=0)
    after_bytes: int = Field(ge=0)

    @property
    def relative(self) -> float | None:
        """Return (after - before) / before; `None` for an increase from 0."""
        return _relative(self.before_bytes, self.after_bytes)


def _relative(before: float, after: float) -> float | None:
    if not before:
        return None if after else 0.0
    return after / before - 1


class LayerChange(Record):
    """A layer in both profiles, or the totals."""

    name: str
    forward: TimeChange
    backward: TimeChange
    activations: SizeChange

    @property
    def time(self) -> TimeChange:
        """Return the change of forward and backward together."""
        flags = (self.forward.significant, self.backward.significant)
        known = [flag for flag in flags if flag is not None]
        return TimeChange(
            before_s=self.forward.before_s + self.backward.before_s,
            after_s=self.forward.after_s + self.backward.after_s,
            significant=any(known) if known else None,
        )


class ProfileDiff(Record):
    """The difference of two profiles.

    Attributes:
        before_id: Content id of the first profile.
        after_id: Content id of the second profile.
        settings: Differences in device, software and settings, with both values.
        layers: Layers in both, in the order of the first.
        total: Totals over all layers of each, without the loss.
        only_before: Layers of the first profile only.
        only_after: Layers of the second profile only.
    """

    before_id: str
    after_id: str
    settings: tuple[tuple[str, str, str], ...] = ()
    layers: tuple[LayerChange, ...]
    total: LayerChange
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()


def diff(before: Profile, after: Profile) -> ProfileDiff:
    """Compare two profiles layer by layer, by name.

    Raises:
        InvalidInput: They have no layer in common.
    """
    first = {entry.layer.name: entry for entry in before.layers}
    second = {entry.layer.name: entry for entry in after.layers}
    common = [name for name in first if name in second]
    if not common:
        raise InvalidInput(
            f"the profiles of {before.model or 'one model'} and {after.model or 'another'} have no "
            "layer name in common; compare profiles of the same model"
        )
    return ProfileDiff(
        before_id=before.content_id(),
        after_id=after.content_id(),
        settings=(
            *compare("first input", _first_input, before, after),
            *setting_differences(before, after),
            *compare("loss", lambda one: "measured" if one.loss else "none", before, after),
        ),
        layers=tuple(_layer(name, first[name], second[name]) for name in common),
        total=_total(before, after),
        only_before=tuple(name for name in first if name not in second),
        only_after=tuple(name for name in second if name not in first),
    )


def _layer(name: str, before: LayerProfile, after: LayerProfile) -> LayerChange:
    return LayerChange(
        name=name,
        forward=time_change([before.forward], [after.forward]),
        backward=time_change([before.backward], [after.backward]),
        activations=SizeChange(
            before_bytes=before.saved_activation_bytes, after_bytes=after.saved_activation_bytes
        ),
    )


def _total(before: Profile, after: Profile) -> LayerChange:
    first, second = before.layers, after.layers
    return LayerChange(
        name="total",
        forward=time_change([one.forward for one in first], [one.forward for one in second]),
        backward=time_change([one.backward for one in first], [one.backward for one in second]),
        activations=SizeChange(before_bytes=_kept(before), after_bytes=_kept(after)),
    )


def time_change(before: Sequence[Timing], after: Sequence[Timing]) -> TimeChange:
    """Compare sums of timings."""
    sums_s = [math.fsum(timing.median_s for timing in part) for part in (before, after)]
    # Spreads of independent measurements add in quadrature.
    spreads_s = [math.hypot(*(timing.spread_s for timing in part)) for part in (before, after)]
    spread_s = max(spreads_s)
    return TimeChange(
        before_s=sums_s[0],
        after_s=sums_s[1],
        significant=abs(sums_s[1] - sums_s[0]) > spread_s if spread_s else None,
    )


def _kept(profile: Profile) -> int:
    # Layers may share a storage; their sum is exact only where the profile lists no storages.
    return sum(storage.size_bytes for storage in profile.storages) or sum(
        entry.saved_activation_bytes for entry in profile.layers
    )


def _first_input(profile: Profile) -> str:
    return "x".join(map(str, profile.inputs[0].shape)) if profile.inputs else "none"
