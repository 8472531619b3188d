"""Device classes and link levels as arrays that the searches' compiled loops read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.cluster.cluster import LinkLevel
from ..cost.device_classes import Devices

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SMALL_START, SMALL_DELAY, SMALL_SHARE, LARGE_START, LARGE_DELAY = range(5)
"""Columns of `DevicePool.protocols`."""


class DevicePool(NamedTuple):
    """Device classes and link levels as arrays; K classes.

    Attributes:
        total: Devices of each class, shape (K,).
        groups: See `DeviceClass.group_sizes`, shape (K, levels).
        between: Level between two classes, shape (K, K).
        speed: Relative to the slowest class, shape (K,).
        protocols: Of all-reduces, shape (levels, 5): the seconds that the protocol for small
            messages takes to start and for each of its 2 (n - 1) messages, its share of the
            bandwidth, and the seconds of the protocol for large ones.
        bandwidth: Bytes per second of an all-reduce, by level and number of ranks, shape
            (levels, counts); the last column holds for more ranks, too.
        least_bandwidth: Bandwidth for lower bounds: with column n, n ranks take no longer than any
            number from n on takes by ``bandwidth``.
        regular_from: Number of replicas from which on more never sum their gradients faster.
        granule: More replicas than this occupy a multiple of it of devices, and on all but the
            last stage come in multiples of it; 0 where they need not.
    """

    total: Integers
    groups: Integers
    between: Integers
    speed: Floats
    protocols: Floats
    bandwidth: Floats
    least_bandwidth: Floats
    regular_from: int
    granule: int


def build_pool(devices: Devices) -> DevicePool:
    """Return the device classes of a cluster as arrays."""
    count, levels = len(devices.classes), devices.bounding_levels
    between = np.zeros((count, count), dtype=np.int64)
    for one in range(count):
        for other in range(count):
            if one != other:
                between[one, other] = devices.level_between(one, other)
    speeds = np.array([entry.speed for entry in devices.classes])
    only = devices.classes[0] if count == 1 else None
    inner = only.group_sizes[0] if only and len(levels) > 1 else 0
    in_whole_groups = inner > 1 and only is not None and len(only) % inner == 0
    groups = np.array(
        [entry.group_sizes[-len(levels) :] for entry in devices.classes], dtype=np.int64
    )
    bandwidth = _tabulate_bandwidth(levels, int(groups.max()))
    return DevicePool(
        total=np.array([len(entry) for entry in devices.classes], dtype=np.int64),
        groups=groups,
        between=between,
        speed=speeds / speeds.min(),
        protocols=np.array([_list_protocols(level) for level in levels]),
        bandwidth=bandwidth,
        least_bandwidth=_bound_bandwidth(bandwidth),
        regular_from=_find_regular_from(bandwidth, groups),
        granule=inner if in_whole_groups else 0,
    )


def _list_protocols(level: LinkLevel) -> tuple[float, ...]:
    """Return a row of `DevicePool.protocols`."""
    if level.all_reduce is None:  # one protocol, a ring; twice the same
        return 0.0, level.latency_s, 1.0, 0.0, level.latency_s
    small, large = level.all_reduce.protocols
    return *small, *large[:2]


def _tabulate_bandwidth(levels: Sequence[LinkLevel], most: int) -> Floats:
    """Return `DevicePool.bandwidth`; no rank sums alone, so columns 0 and 1 are those of two."""
    known = [level.all_reduce.bandwidth[-1][0] for level in levels if level.all_reduce]
    counts = range(min(max(known, default=0), most) + 1)
    return np.array(
        [
            [
                level.all_reduce.bus_bandwidth(count)
                if level.all_reduce
                else level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s
                for count in counts
            ]
            for level in levels
        ]
    )


def time_protocols(
    protocols: Floats, level: int, messages: int, part: Any, bandwidth: float
) -> tuple[float, float]:
    """Return the times of both protocols for so many messages of ``part`` bytes each."""
    small_s = protocols[level][SMALL_DELAY] + part / (protocols[level][SMALL_SHARE] * bandwidth)
    large_s = protocols[level][LARGE_DELAY] + part / bandwidth
    return (
        protocols[level][SMALL_START] + messages * small_s,
        protocols[level][LARGE_START] + messages * large_s,
    )


def _bound_bandwidth(bandwidth: Floats) -> Floats:
    """Return `DevicePool.least_bandwidth`.

    m ranks take as long for their bytes as n of them with (n - 1) / n x m / (m - 1) of the
    bandwidth of m.
    """
    sent = _count_sent(bandwidth)
    least = np.minimum.accumulate((sent / bandwidth)[:, ::-1], axis=1)[:, ::-1]
    found: Floats = sent / least
    return found


def _count_sent(bandwidth: Floats) -> Floats:
    """Return half of what a rank sends, as a share of the message, by number of ranks."""
    ranks = np.maximum(np.arange(bandwidth.shape[1]), 2)
    return (ranks - 1) / ranks


def _find_regular_from(bandwidth: Floats, groups: Integers) -> int:
    """Return `DevicePool.regular_from`: the number of replicas behind the last fall of the time."""
    found = 0
    for level, times in enumerate(_count_sent(bandwidth) / bandwidth):
        inner = groups[:, :level].max(axis=1, initial=1)
        most = int(np.max(-(-groups[:, level] // inner)))  # members of a ring at this level
        falls = np.flatnonzero(np.diff(times[: most + 1]) < 0)
        if len(falls):
            found = max(found, int(inner.max()) * int(falls[-1] + 1))
    return found
