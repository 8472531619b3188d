"""Latency and bandwidth of links from the times of messages and all-reduces.

Errors are relative: a message of 1 KiB counts as much as one of 64 MiB. Times that fit badly, such
as those during which something else ran, count less (Huber 1964).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.errors import MeasurementError
from .records import LevelFit, LevelTimes, LinkTime

ROUNDS = 30
"""Rounds of reweighting; the weights settle much earlier."""

HUBER = 1.345
"""Residuals beyond this many deviations count less: 95 % efficient for normal errors (Huber)."""

DEVIATION = 1.4826
"""Standard deviation of normal errors over their median absolute value."""

EXACT = 1e-9
"""Residuals below are rounding."""

SHARED_FROM = 1.5
"""A level is shared if messages sent at once take this many times longer than one alone."""

LARGE_BYTES = 2**20
"""All-reduces of at least this size count for the reported error."""

NO_LIMIT = 1e30
"""A bandwidth at which bytes cost nothing."""


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit latency in seconds and bandwidth in bytes/s of one-way messages of at least two sizes.

    Weighted least squares of ``latency + bytes / bandwidth`` in relative errors; no latency below
    zero.
    """
    if len({size for size, _ in points}) < 2:
        raise MeasurementError("links need messages of at least two sizes; allow more time")
    latency_s, per_byte_s = 0.0, 0.0
    weights = [1.0] * len(points)
    for _ in range(ROUNDS):
        latency_s, per_byte_s = _weighted_line(points, weights)
        residuals = [(latency_s + per_byte_s * size) / time_s - 1 for size, time_s in points]
        weights = _weights(residuals)
    if per_byte_s <= 0:  # noise alone: the largest message still bounds the bandwidth from below
        size, time_s = max(points)
        return latency_s, size / time_s
    return latency_s, 1 / per_byte_s


def fit_levels(levels: Sequence[LevelTimes], cluster: Cluster) -> tuple[LevelFit, ...]:
    """Fit each level to its times, the innermost first.

    The bandwidth of all-reduces is the one with which `Cluster.all_reduce_time_s` comes nearest to
    the all-reduces measured, those over inner levels included.
    """
    fits: list[LevelFit] = []
    for found in levels:
        messages = [entry for entry in found.times if entry.what == "message"]
        latency_s, bandwidth = fit_line([(one.size_bytes, one.time_s) for one in messages])
        level = LinkLevel(
            name=found.name,
            group_size=found.group_size,
            latency_s=latency_s,
            bandwidth_bytes_per_s=bandwidth,
            shared=found.slowdown is not None and found.slowdown >= SHARED_FROM,
        )
        inner = tuple(fit.level for fit in fits)
        reduces = [entry for entry in found.times if entry.what == "all_reduce"]
        if reduces:
            level = _with_all_reduce(cluster, inner, level, reduces)
        fits.append(_fit(cluster, (*inner, level), found, messages, reduces))
    return tuple(fits)


def _with_all_reduce(
    cluster: Cluster, inner: tuple[LinkLevel, ...], level: LinkLevel, reduces: list[LinkTime]
) -> LinkLevel:
    """Fit a level's all-reduce bandwidth; times are linear in its reciprocal."""

    def predicted_s(bandwidth: float) -> list[float]:
        changed = level.model_copy(update={"all_reduce_bandwidth_bytes_per_s": bandwidth})
        return [all_reduce_s(cluster, (*inner, changed), entry) for entry in reduces]

    fixed_s = predicted_s(NO_LIMIT)
    points = [
        (whole_s - base_s, base_s, entry.time_s)
        for entry, base_s, whole_s in zip(reduces, fixed_s, predicted_s(1.0), strict=True)
    ]
    per_byte_s = _weighted_slope(points)
    if per_byte_s <= 0:  # latencies explain more than all of it: nothing tells a bandwidth
        return level
    return level.model_copy(update={"all_reduce_bandwidth_bytes_per_s": 1 / per_byte_s})


def _weighted_slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Fit the slope of ``base + slope * bytes`` that is nearest to the times, relatively.

    Points are bytes moved, base and time. An all-reduce counts by the share of its time that its
    bytes take: of the small ones the latency is nearly all, which messages have already told and
    which one ring models badly.
    """
    large = sorted(points)[len(points) * 2 // 3 :]
    slope = median((time_s - base_s) / moved for moved, base_s, time_s in large)
    weights = [1.0] * len(points)
    for _ in range(ROUNDS):
        if slope <= 0:
            break
        above = below = 0.0
        for weight, (moved, base_s, time_s) in zip(weights, points, strict=True):
            share = slope * moved / (base_s + slope * moved)
            above += weight * share * moved * (time_s - base_s) / time_s**2
            below += weight * share * (moved / time_s) ** 2
        slope = above / below
        weights = _weights(
            [(base_s + slope * moved) / time_s - 1 for moved, base_s, time_s in points]
        )
    return slope


def all_reduce_s(cluster: Cluster, levels: tuple[LinkLevel, ...], entry: LinkTime) -> float:
    """Predict an all-reduce by the cluster model, from the ranks each group holds."""
    sizes = tuple(level.group_size or len(cluster.devices) for level in levels)
    held = tuple(max(Counter(rank // size for rank in entry.ranks).values()) for size in sizes)
    # A validated cluster would need levels that join all its devices; the inner ones do not.
    partial = cluster.model_copy(update={"levels": levels})
    return partial.all_reduce_time_s(entry.size_bytes, len(entry.ranks), len(levels) - 1, held)


def _fit(
    cluster: Cluster,
    levels: tuple[LinkLevel, ...],
    found: LevelTimes,
    messages: list[LinkTime],
    reduces: list[LinkTime],
) -> LevelFit:
    level = levels[-1]
    of_messages = [abs(level.transfer_time_s(one.size_bytes) / one.time_s - 1) for one in messages]
    of_reduces = [
        (one.size_bytes >= LARGE_BYTES, abs(all_reduce_s(cluster, levels, one) / one.time_s - 1))
        for one in reduces
    ]
    large = [error for is_large, error in of_reduces if is_large]
    every = [error for _, error in of_reduces]
    return LevelFit(
        level=level,
        message_error=median(of_messages),
        all_reduce_error=median(large or every) if every else None,
        worst_error=max([*of_messages, *every]),
        measured=found,
    )


def _weighted_line(
    points: Sequence[tuple[int, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Solve the weighted least squares of relative errors for latency and seconds per byte."""
    ones = sizes = squares = times = products = 0.0
    for (size, time_s), weight in zip(points, weights, strict=True):
        # Dividing by the squared time turns squared absolute errors into relative ones.
        scale = weight / time_s**2
        ones += scale
        sizes += scale * size
        squares += scale * size * size
        times += scale * time_s
        products += scale * size * time_s
    determinant = ones * squares - sizes * sizes
    latency_s = (times * squares - sizes * products) / determinant
    # The optimum under latency >= 0 lies on the border then: a line through the origin.
    if latency_s < 0:
        return 0.0, products / squares
    return latency_s, (ones * products - sizes * times) / determinant


def _weights(residuals: Sequence[float]) -> list[float]:
    """Return Huber's weights: 1 up to a limit, then falling with the residual."""
    limit = max(HUBER * DEVIATION * median(map(abs, residuals)), EXACT)
    return [1.0 if abs(one) <= limit else limit / abs(one) for one in residuals]
