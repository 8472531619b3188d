"""Error of a profile's times, and the verdict on its quality: good, fair or poor."""

from __future__ import annotations

from statistics import median
from typing import Literal, NamedTuple

from .profile import Profile

FAIR_ERROR, POOR_ERROR = 0.10, 0.25
"""Sum of the layers against the whole model, in shares of the whole."""
FAIR_SPREAD, POOR_SPREAD = 0.10, 0.25
"""Interquartile range of a layer's repeats, in shares of its time; the middle layer counts."""
FAIR_BAND = 0.30
"""Known error of an estimate. An estimate is never good, and poor where its error is not known."""


class Grade(NamedTuple):
    """A verdict and why it is not better; there are no reasons for a good one."""

    verdict: Literal["good", "fair", "poor"]
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"profile quality: {self.verdict}" + (
            f" ({'; '.join(self.reasons)})" if self.reasons else ""
        )


def grade(profile: Profile) -> Grade:
    """Grade a profile; the worst aspect counts, and all that lower the grade are named."""
    found = [*_measured(profile), *_estimated(profile)]
    if not found:
        return Grade("good")
    poor = tuple(reason for is_poor, reason in found if is_poor)
    return Grade("poor", poor) if poor else Grade("fair", tuple(reason for _, reason in found))


def relative_error(profile: Profile) -> float:
    """Return the error to expect of a profile's times, as a share; 1 if it is not known."""
    if profile.provenance.source == "estimated":
        band = profile.provenance.error_band
        return 1.0 if band is None else band
    whole = profile.reconciliation
    return abs(whole.relative_error) if whole is not None else 0.0


def _measured(profile: Profile) -> list[tuple[bool, str]]:
    """Return what lowers the grade of a measurement, and whether to poor."""
    found = []
    whole = profile.reconciliation
    if whole is not None and abs(whole.relative_error) > FAIR_ERROR:
        reason = f"its layers sum to {whole.relative_error:+.0%} of the whole model's time"
        found.append((abs(whole.relative_error) > POOR_ERROR, reason))
    timings = [timing for entry in profile.layers for timing in (entry.forward, entry.backward)]
    spread = [timing.spread_s / timing.median_s for timing in timings if timing.median_s]
    if spread and median(spread) > FAIR_SPREAD:
        reason = f"repeats of a layer spread by {median(spread):.0%} of its time"
        found.append((median(spread) > POOR_SPREAD, reason))
    clocks = profile.provenance.clocks
    if clocks is not None and clocks.throttled_by:
        found.append((False, f"the GPU was held back by {', '.join(clocks.throttled_by)}"))
    return found


def _estimated(profile: Profile) -> list[tuple[bool, str]]:
    if profile.provenance.source != "estimated":
        return []
    band = profile.provenance.error_band
    if band is None:
        return [(True, "estimated, and the error of such estimates is not known")]
    reason = f"estimated, within {band:.0%} on the devices that were measured"
    return [(band > FAIR_BAND, reason)]
