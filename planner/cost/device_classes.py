"""Classes of interchangeable devices and their layout over the link levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

from ...core.cluster.cluster import Cluster, LinkLevel
from ...core.cluster.pair_links import Pair, number_pair_links
from ...core.cluster.places import list_groups
from ...core.cluster.reserves import ReservedMemory
from ...core.plan.plan import PlanOptions

NO_LINK = LinkLevel(name="none", group_size=1, latency_s=0.0, bandwidth_bytes_per_s=1e30)
"""Stands in where a cluster of one device describes no link."""


MAX_TAILS = 16
"""Smaller groups that are tried behind the equal ones of a class, each in O(devices)."""


@dataclass(frozen=True)
class DeviceClass:
    """Equal devices, counted in an order that keeps groups of each level together.

    Speed is relative to the device profiled; ``devices`` are indices in the cluster. A group of
    each link level holds ``group_sizes`` consecutive devices of this class, the last one perhaps
    fewer; the outermost level holds all.
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
    """A cluster as classes of equal devices, in order of first appearance.

    ``groups`` has each device's group at each level: [level][index in the cluster].
    """

    cluster: Cluster
    classes: tuple[DeviceClass, ...]
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def levels(self) -> tuple[LinkLevel, ...]:
        """Return the cluster's link levels; a placeholder if it has none."""
        return self.cluster.levels or (NO_LINK,)

    @cached_property
    def pair_links(self) -> dict[int, dict[Pair, LinkLevel]]:
        """Return the links between two groups, by the level that joins these."""
        return number_pair_links(self.cluster, self.groups)

    @cached_property
    def has_equal_places(self) -> bool:
        """Return True if stages with equal devices and cuts on equal levels take equally long.

        With links of pairs, which of them a cut crosses depends on where its stages are; with
        several classes, so does the shared connection by which a stage leaves.
        """
        is_shared = any(level.shared for level in self.levels)
        return not self.pair_links and not (is_shared and len(self.classes) > 1)

    @cached_property
    def bounding_cluster(self) -> Cluster:
        """Return the cluster with the fastest link of any pair at each level, for lower bounds.

        Two classes are joined by one level, though some of their devices meet at an inner one:
        links of inner levels count too.
        """
        levels, known = [], []
        for level, own in enumerate(self.cluster.levels):
            known += list(self.pair_links.get(level, {}).values())
            if not known:
                levels.append(own)
                continue
            delays = [each.latency_s for each in (own, *known)]
            rates = [each.bandwidth_bytes_per_s for each in (own, *known)]
            sums = [
                each.all_reduce_bandwidth_bytes_per_s or each.bandwidth_bytes_per_s
                for each in (own, *known)
                if not each.all_reduce
            ]
            if own.all_reduce:  # a ring at least as fast as its two protocols, for any number
                delays += [delay_s for _, delay_s, _ in own.all_reduce.protocols]
                sums += [rate for _, rate in own.all_reduce.bandwidth]
            change = {
                "latency_s": min(delays),
                "bandwidth_bytes_per_s": max(rates),
                "all_reduce_bandwidth_bytes_per_s": max(sums),
                "all_reduce": None,
            }
            levels.append(own.model_copy(update=change))
        return self.cluster.model_copy(update={"levels": tuple(levels), "links": ()})

    @property
    def bounding_levels(self) -> tuple[LinkLevel, ...]:
        """Return the levels of `bounding_cluster`; a placeholder if there are none."""
        return self.bounding_cluster.levels or (NO_LINK,)

    def link_of(self, level: int, one: int, other: int) -> LinkLevel:
        """Return the link of two devices that a level joins: that of their groups, if given."""
        # Devices of two classes may meet further in than the level that joins these.
        for inner in range(1, level + 1) if self.pair_links else ():
            first, second = self.groups[inner - 1][one], self.groups[inner - 1][other]
            pair = min(first, second), max(first, second)
            if pair in self.pair_links.get(inner, {}):
                return self.pair_links[inner][pair]
        return self.levels[level]

    def list_rings(self, devices: Sequence[int]) -> tuple[tuple[LinkLevel, ...], ...]:
        """Return the links between neighbours in the rings of an all-reduce, by level.

        The rings of a level join the groups inside it, in the order of the devices, the last with
        the first. Empty where no pair has a link of its own.
        """
        if not self.pair_links:
            return ()
        rings: list[tuple[LinkLevel, ...]] = [self.levels[:1]]
        for level in range(1, len(self.levels)):
            inside: dict[int, dict[int, int]] = {}
            for device in devices:
                members = inside.setdefault(self.groups[level][device], {})
                members.setdefault(self.groups[level - 1][device], device)
            found = {
                self.link_of(level, one, other)
                for members in inside.values()
                if len(members) > 1
                for one, other in pairwise([*members.values(), next(iter(members.values()))])
            }
            rings.append(tuple(found) or self.levels[level : level + 1])
        return tuple(rings)

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
        return Devices(self.cluster, tuple(classes), self.groups)

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
        first, second = self._class_groups[one], self._class_groups[other]
        for level, (ours, theirs) in enumerate(zip(first, second, strict=True)):
            if len(ours | theirs) == 1:
                return level
        return len(self.levels) - 1

    @cached_property
    def _class_groups(self) -> list[list[set[int]]]:
        """Return the groups of each class's devices: [class][level]."""
        return [
            [{groups[index] for index in entry.devices} for groups in self.groups]
            for entry in self.classes
        ]


def group_devices(cluster: Cluster, options: PlanOptions) -> Devices:
    """Group a cluster's devices by kind, speed and memory, and each kind into regular classes.

    A class is regular if, on every level, its groups hold equally many of its devices, and the last
    one no more. The largest innermost groups of a kind are one class, with a smaller one behind
    them, such as a node that lost a device, where that stays regular; then those that are left.
    """
    groups = list_groups(cluster)
    classes = tuple(
        DeviceClass(
            kind=kind,
            speed=speed,
            limit_bytes=usable_bytes(memory_bytes, options),
            devices=run,
            group_sizes=(*(_counts(of_level, run)[0] for of_level in groups[:-1]), len(run)),
        )
        for (kind, speed, memory_bytes), indices in _kinds(cluster).items()
        for run in _split_regular(indices, groups[:-1])
    )
    return Devices(cluster, classes, groups)


def _kinds(cluster: Cluster) -> dict[tuple[str, float, int | None], list[int]]:
    members: dict[tuple[str, float, int | None], list[int]] = {}
    for index, device in enumerate(cluster.devices):
        members.setdefault((device.kind, device.speed, device.memory_bytes), []).append(index)
    return members


def _split_regular(
    indices: Sequence[int], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Split devices of a kind into regular classes; ``groups`` are those of the inner levels."""
    left = list(indices)
    while left:
        run = _take_run(left, groups)
        yield tuple(run)
        taken = set(run)
        left = [index for index in left if index not in taken]


def _take_run(indices: list[int], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the largest innermost groups, as many as are regular, and a smaller one behind."""
    if not groups:
        return indices
    parts: dict[int, list[int]] = {}
    for index in indices:
        parts.setdefault(groups[0][index], []).append(index)
    largest = max(map(len, parts.values()))
    run = _order(groups, [i for part in parts.values() if len(part) == largest for i in part])
    run = run[: min(_regular_length(of_level, run) for of_level in groups)]
    smaller = sorted((p for p in parts.values() if len(p) < largest), key=len, reverse=True)
    # Of a level above, the group behind has to be in the last group, or in one of its own.
    for tail in smaller[:MAX_TAILS]:
        longer = [*run, *tail]
        if all(
            _regular_length(of_level, longer) == len(longer)
            and len(_counts(of_level, longer)) == len({of_level[index] for index in longer})
            for of_level in groups
        ):
            return longer
    return run


def _order(groups: Sequence[Sequence[int]], indices: list[int]) -> list[int]:
    """Return devices group by group, on every level the groups with most of them first."""
    if not groups:
        return indices
    parts: dict[int, list[int]] = {}
    for index in indices:
        parts.setdefault(groups[-1][index], []).append(index)
    ordered = [_order(groups[:-1], part) for part in parts.values()]
    return [index for part in sorted(ordered, key=len, reverse=True) for index in part]


def _counts(groups: Sequence[int], indices: Sequence[int]) -> list[int]:
    """Return how many neighbours among these devices are in one group, run by run."""
    return [len(list(run)) for _, run in groupby(groups[index] for index in indices)]


def _regular_length(groups: Sequence[int], indices: Sequence[int]) -> int:
    """Return how many of the first devices are in groups of one size, and one smaller behind."""
    counts = _counts(groups, indices)
    equal = next((n for n, count in enumerate(counts) if count != counts[0]), len(counts))
    if equal < len(counts) and counts[equal] < counts[0]:
        equal += 1
    return sum(counts[:equal])


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
