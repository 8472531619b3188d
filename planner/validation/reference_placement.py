"""Reference rules of placement: where a stage may lie and which links it uses, by device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from ...core.cluster.cluster import Cluster, Device, LinkLevel
from ...core.cluster.pair_links import PairLink


@dataclass(frozen=True)
class StagePlacement:
    """Devices of one class that hold a stage."""

    cluster: Cluster
    devices: tuple[int, ...]

    @property
    def speed(self) -> float:
        return self.cluster.devices[self.devices[0]].speed

    @property
    def kind(self) -> str:
        return self.cluster.devices[self.devices[0]].kind

    @cached_property
    def peers(self) -> list[int]:
        """All devices of the class, in its order."""
        return _peers(self.cluster, self.devices[0])

    def is_like(self, other: StagePlacement) -> bool:
        return other.devices[0] in self.peers

    def is_in_front_of(self, other: StagePlacement) -> bool:
        if not self.is_like(other):
            return False
        return self.peers.index(self.devices[0]) < self.peers.index(other.devices[0])

    def ranks(self) -> list[int]:
        """Return the devices' positions among all devices of their class."""
        ranks = {device: rank for rank, device in enumerate(self.peers)}
        return [ranks[device] for device in self.devices]

    def faults(self, *, is_last: bool = True) -> Iterator[str]:
        """Yield the rules of placement that this stage breaks by itself.

        The last stage has none behind it on devices of its class.
        """
        if not set(self.devices) <= set(self.peers):
            yield "its devices differ in kind, speed, memory or class"
            return
        ranks = self.ranks()
        first, end = ranks[0], ranks[0] + len(ranks)
        if ranks != list(range(first, end)):
            yield "its devices are not contiguous"
            return
        for number, level in enumerate(self.cluster.levels[:-1]):
            groups = _groups(self.cluster, number)
            size = [groups[peer] for peer in self.peers].count(groups[self.peers[0]])
            inside = first // size == (end - 1) // size
            whole = first % size == 0 and (end % size == 0 or is_last)
            if not inside and not whole:
                yield f"its devices are neither inside one {level.name!r} nor all of several"

    def all_reduce_s(self, size_bytes: int) -> float:
        """Return the time of a hierarchical ring all-reduce over the stage's devices.

        Rings inside the innermost groups come first, then rings over groups, each device with its
        share of the data.
        """
        if len(self.devices) == 1:
            return 0.0
        total_s, share, members = 0.0, size_bytes, list(self.devices)
        for number, level in enumerate(self.cluster.levels):
            numbers = _groups(self.cluster, number)
            groups: dict[object, list[int]] = {}
            for device in members:
                groups.setdefault(numbers[device], []).append(device)
            fullest = max(len(group) for group in groups.values())
            total_s += max(
                all_reduce_s(pair_link(self.cluster, one, other) or level, share, fullest)
                for group in groups.values()
                for one, other in zip(group, [*group[1:], group[0]], strict=True)
                if len(group) > 1 or fullest == 1
            )
            share = math.ceil(share / fullest)
            members = [group[0] for group in groups.values()]
            if len(members) == 1:
                break
        return total_s

    def shared_exit(self, level: int) -> int | None:
        """Return the group through whose one connection messages leave the stage at a level.

        Returns `None` if the level is not shared or the devices span several groups.
        """
        if not self.cluster.levels[level].shared:
            return None
        inside = _groups(self.cluster, level - 1) if level else range(len(self.cluster.devices))
        groups = {inside[device] for device in self.devices}
        return groups.pop() if len(groups) == 1 else None


def pair_link(cluster: Cluster, one: int, other: int) -> PairLink | None:
    """Return the link of the two groups that two devices lie in, if the cluster has one."""
    for link in cluster.links:
        number = [level.name for level in cluster.levels].index(link.level)
        if {str(_group(cluster, number, device)) for device in (one, other)} == set(link.groups):
            return link
    return None


def transfer_s(link: LinkLevel | PairLink, size_bytes: int) -> float:
    """Return the time of one message; nothing takes none."""
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s if size_bytes else 0.0


def all_reduce_s(link: LinkLevel | PairLink, size_bytes: float, num_ranks: int) -> float:
    """Return the time of a ring over so many ranks, each step of which takes 1/n of the bytes.

    Where figures by size and number are given, the time of the faster of their two protocols.
    """
    if num_ranks == 1 or size_bytes == 0:
        return 0.0
    figures = None if isinstance(link, PairLink) else link.all_reduce
    if figures is None:
        rate = link.all_reduce_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s
        return 2 * (num_ranks - 1) * (link.latency_s + size_bytes / num_ranks / rate)
    # Between the numbers of ranks given, a power law; beyond them, the figure of the nearest.
    counts, rates = np.array(figures.bandwidth).T
    rate = float(np.exp(np.interp(np.log(num_ranks), np.log(counts), np.log(rates))))
    others = num_ranks - 1
    wire_s = 2 * others * size_bytes / num_ranks / rate
    small_s = figures.start_s + others * figures.step_s + wire_s / figures.small_share
    large_s = figures.large_start_s + others * figures.large_step_s + wire_s
    return min(small_s, large_s)


def level_between(cluster: Cluster, one: int, other: int) -> int:
    """Return the link level between two devices of a plan.

    Within a class, the innermost with both in one group. Between two classes it is the outermost
    level that joins any device of the one with any of the other.
    """
    peers = _peers(cluster, one)
    if other not in peers:
        everyone = [*peers, *_peers(cluster, other)]
        return max(_level(cluster, everyone[0], device) for device in everyone)
    return _level(cluster, one, other)


def _level(cluster: Cluster, one: int, other: int) -> int:
    for number in range(len(cluster.levels)):
        if _group(cluster, number, one) == _group(cluster, number, other):
            return number
    return len(cluster.levels) - 1


def _group(cluster: Cluster, level: int, device: int) -> object:
    size = cluster.levels[level].group_size
    if size is None:
        return cluster.devices[device].place.get(cluster.levels[level].name)
    return device // size


def _groups(cluster: Cluster, level: int) -> list[int]:
    named = [_group(cluster, level, device) for device in range(len(cluster.devices))]
    first = {name: device for device, name in reversed(list(enumerate(named)))}
    return [first[name] for name in named]


def _peers(cluster: Cluster, device: int) -> list[int]:
    """Return the class of a device: the largest groups of its kind, and one smaller behind."""
    like = _class_of(cluster.devices[device])
    left = [index for index, entry in enumerate(cluster.devices) if _class_of(entry) == like]
    levels = [_groups(cluster, number) for number in range(len(cluster.levels) - 1)]
    while levels:
        found = _first_class(left, levels)
        if device in found:
            return found
        left = [index for index in left if index not in found]
    return left


def _first_class(left: list[int], levels: list[list[int]]) -> list[int]:
    names = dict.fromkeys(levels[0][device] for device in left)
    nodes = [[device for device in left if levels[0][device] == name] for name in names]
    largest = max(map(len, nodes))
    full = [node for node in nodes if len(node) == largest]

    def outside_in(node: list[int]) -> list[tuple[int, int]]:
        # Groups of outer levels with most full nodes first, then in the cluster's order.
        around = [
            [other[0] for other in full if numbers[other[0]] == numbers[node[0]]]
            for numbers in reversed(levels)
        ]
        return [(-len(others), others[0]) for others in around]

    full = sorted(full, key=outside_in)
    full = full[: min(_count_regular(full, numbers) for numbers in levels)]
    smaller = sorted((node for node in nodes if len(node) < largest), key=len, reverse=True)
    tail = next((node for node in smaller if _is_regular([*full, node], levels)), [])
    return [device for node in [*full, tail] for device in node]


def _count_regular(nodes: list[list[int]], numbers: list[int]) -> int:
    """Return how many nodes are in groups with as many as the first, and one with fewer behind."""
    sizes = [len(list(piece)) for _, piece in groupby(nodes, key=lambda node: numbers[node[0]])]
    found = 0
    for size in sizes:
        if size > sizes[0]:
            break
        found += size
        if size < sizes[0]:
            break
    return found


def _is_regular(nodes: list[list[int]], levels: list[list[int]]) -> bool:
    """Return True if groups are in one piece and of one size, but for a smaller last one."""
    devices = [device for node in nodes for device in node]
    for numbers in levels:
        pieces = [list(piece) for _, piece in groupby(devices, key=numbers.__getitem__)]
        sizes = [len(piece) for piece in pieces]
        if len({numbers[piece[0]] for piece in pieces}) < len(pieces):
            return False
        if set(sizes[:-1]) - {sizes[0]} or sizes[-1] > sizes[0]:
            return False
    return True


def _class_of(device: Device) -> tuple[str, float, int | None]:
    return device.kind, device.speed, device.memory_bytes
