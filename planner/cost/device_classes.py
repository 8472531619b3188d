"""Classes of interchangeable devices and their layout over the link levels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import numpy as np

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.cluster.reserves import ReservedMemory
from ...core.plan.plan import PlanOptions

NO_LINK = LinkLevel(name="none", group_size=1, latency_s=0.0, bandwidth_bytes_per_s=1e30)
"""Stands in where a cluster of one device describes no link."""


@dataclass(frozen=True)
class DeviceClass:
    """Equal devices, counted in cluster order.

    Speed is relative to the device profiled; ``devices`` are indices in the cluster, ascending. A
    group of each link level holds ``group_sizes`` consecutive devices of this class, 1 where groups
    hold different numbers; the outermost level holds all.
    """

    kind: str
    speed: float
    limit_bytes: int | None
    devices: tuple[int, ...]
    group_sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.devices)

    def level_of(self, first: int, last: int) -> int:
        """Return the innermost level that joins two devices, given by their ranks in the class."""
        for level, size in enumerate(self.group_sizes):
            if first // size == last // size:
                return level
        return len(self.group_sizes) - 1

    def place(self, end: int, replicas: int, *, is_last: bool = False) -> int:
        """Return the latest end, at most ``end``, of a stage with this many replicas, or -1.

        The latest place at which, on every level but the outermost, the stage lies inside one
        group or is made of whole ones, of which the last may be partial for the last stage of
        the class; -1 if there is none. Devices between that place and ``end`` stay idle.
        """
        # Moving the end for one level may break the alignment of another, so repeat until no level
        # moves it; it only ever decreases, so this ends.
        settled = False
        while not settled:
            settled = True
            for size in self.group_sizes[:-1]:
                if replicas <= size:
                    if (end - 1) // size != (end - replicas) // size:
                        end, settled = end // size * size, False
                    break
                if is_last:
                    if (end - replicas) % size:
                        end, settled = end - (end - replicas) % size, False
                    continue
                if end % size:
                    end, settled = end // size * size, False
                if replicas % size:
                    return -1
            if end < replicas:
                return -1
        return end


@dataclass(frozen=True)
class Devices:
    """A cluster as classes of equal devices, in order of first appearance."""

    cluster: Cluster
    classes: tuple[DeviceClass, ...]

    @cached_property
    def levels(self) -> tuple[LinkLevel, ...]:
        """Return the cluster's link levels; a placeholder if it has none."""
        return self.cluster.levels or (NO_LINK,)

    @cached_property
    def fastest(self) -> float:
        """Return the highest speed of any class."""
        return max(entry.speed for entry in self.classes)

    def cap_memory(self, limit_bytes: int | None) -> Devices:
        """Return the devices with every memory limit capped at ``limit_bytes``, if given."""
        if limit_bytes is None:
            return self
        return self.change_limits(lambda own: limit_bytes if own is None else min(own, limit_bytes))

    def change_limits(self, change: Callable[[int | None], int | None]) -> Devices:
        """Return the devices with every memory limit, `None` for none, replaced by another."""
        classes = (replace(each, limit_bytes=change(each.limit_bytes)) for each in self.classes)
        return Devices(self.cluster, tuple(classes))

    def is_roomier(self, other: Devices) -> bool:
        """Return True if some device has a higher memory limit than in ``other``."""
        return any(
            theirs.limit_bytes is not None
            and (ours.limit_bytes is None or ours.limit_bytes > theirs.limit_bytes)
            for ours, theirs in zip(self.classes, other.classes, strict=True)
        )

    def level_between(self, one: int, other: int) -> int:
        """Return the slowest link level between any device of one class and any of another."""
        if one == other:
            raise ValueError("level_between is for two different classes")
        first, second = self.classes[one].devices, self.classes[other].devices
        span = (min(first[0], second[0]), max(first[-1], second[-1]))
        return _level(self.cluster, *span)


def group_devices(cluster: Cluster, options: PlanOptions) -> Devices:
    """Group a cluster's devices by kind, speed and memory."""
    members: dict[tuple[str, float, int | None], list[int]] = {}
    index = 0
    for key, alike in groupby(cluster.devices, attrgetter("kind", "speed", "memory_bytes")):
        after = index + len(list(alike))
        members.setdefault(key, []).extend(range(index, after))
        index = after
    classes = tuple(
        DeviceClass(
            kind=kind,
            speed=speed,
            limit_bytes=usable_bytes(memory_bytes, options),
            devices=tuple(indices),
            group_sizes=_group_sizes(cluster, indices),
        )
        for (kind, speed, memory_bytes), indices in members.items()
    )
    return Devices(cluster, classes)


def _group_sizes(cluster: Cluster, indices: list[int]) -> tuple[int, ...]:
    """Return the `DeviceClass.group_sizes` of the devices with these indices."""
    sizes = []
    for level in cluster.levels[:-1]:
        groups = np.array(indices) // level.group_size
        begins = np.flatnonzero(np.diff(groups, prepend=-1))
        counts = np.diff(begins, append=len(groups)).tolist()
        # Only where all groups but the last are equal does rank // size tell a device's group.
        regular = counts[:-1] == counts[:1] * (len(counts) - 1) and counts[-1] <= counts[0]
        sizes.append(counts[0] if regular else 1)
    return (*sizes, len(indices))


def _level(cluster: Cluster, first: int, last: int) -> int:
    for index, level in enumerate(cluster.levels):
        if first // level.group_size == last // level.group_size:
            return index
    return max(len(cluster.levels) - 1, 0)


LARGEST_TOTAL_BYTES = 2**60
"""Above this (1 EiB) products of bytes and micro-batches could overflow 64 bits."""

LARGEST_TOTAL_S = 1e12
"""Above this (30,000 years) a time is a mistake, and sums could become infinite."""


def usable_bytes(memory_bytes: int | None, options: PlanOptions) -> int | None:
    """Return what a plan may use of a device: a share, rounded down, less the reserves."""
    if memory_bytes is None:
        return None
    usable = math.floor(memory_bytes * options.memory_fraction)
    return max(0, usable - reserved_memory(memory_bytes, options).total_bytes)


def reserved_memory(memory_bytes: int | None, options: PlanOptions) -> ReservedMemory:
    """Return what the options reserve of a device; nothing if its memory has no limit."""
    if memory_bytes is None or options.reserves is None:
        return ReservedMemory()
    return options.reserves.of_device(memory_bytes)
