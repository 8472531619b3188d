"""Reference rules of placement: where a stage may lie and which links it uses, by device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ...core.cluster.cluster import Cluster, Device


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
        """All devices of the class."""
        return _peers(self.cluster, self.devices[0])

    def is_like(self, other: StagePlacement) -> bool:
        devices = self.cluster.devices
        return _class_of(devices[self.devices[0]]) == _class_of(devices[other.devices[0]])

    def is_in_front_of(self, other: StagePlacement) -> bool:
        return self.is_like(other) and self.devices[0] < other.devices[0]

    def ranks(self) -> list[int]:
        """Return the devices' positions among all devices of their class."""
        ranks = {device: rank for rank, device in enumerate(self.peers)}
        return [ranks[device] for device in self.devices]

    def faults(self, *, is_last: bool = True) -> Iterator[str]:
        """Yield the rules of placement that this stage breaks by itself.

        The last stage has none behind it on devices of its class.
        """
        if not set(self.devices) <= set(self.peers):
            yield "its devices differ in kind, speed or memory"
            return
        ranks = self.ranks()
        first, end = ranks[0], ranks[0] + len(ranks)
        if ranks != list(range(first, end)):
            yield "its devices are not contiguous"
            return
        sizes = _group_sizes(self.cluster, self.peers)
        for level, size in zip(self.cluster.levels[:-1], sizes[:-1], strict=True):
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
        total_s, share, members = 0.0, size_bytes, self.ranks()
        sizes = _group_sizes(self.cluster, self.peers)
        for level, size in zip(self.cluster.levels, sizes, strict=True):
            groups: dict[int, list[int]] = {}
            for rank in members:
                groups.setdefault(rank // size, []).append(rank)
            fullest = max(len(group) for group in groups.values())
            total_s += level.all_reduce_time_s(share, fullest)
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
        if level == 0:
            groups = set(self.devices)
        else:
            inside = self.cluster.levels[level - 1].group_size
            groups = {device // inside for device in self.devices}
        return groups.pop() if len(groups) == 1 else None


def level_between(cluster: Cluster, one: int, other: int) -> int:
    """Return the link level between two devices of a plan.

    Within a class, groups are counted in devices of that class. Between two classes it is the
    outermost level that joins any device of the one with any of the other.
    """
    peers = _peers(cluster, one)
    if _class_of(cluster.devices[one]) != _class_of(cluster.devices[other]):
        others = _peers(cluster, other)
        ends = [(first, second) for first in (peers[0], peers[-1]) for second in others]
        return max(cluster.levels.index(cluster.link(*pair)) for pair in ends)
    first, second = peers.index(one), peers.index(other)
    sizes = _group_sizes(cluster, peers)
    return next(level for level, size in enumerate(sizes) if first // size == second // size)


def _peers(cluster: Cluster, device: int) -> list[int]:
    like = _class_of(cluster.devices[device])
    return [index for index, entry in enumerate(cluster.devices) if _class_of(entry) == like]


def _class_of(device: Device) -> tuple[str, float, int | None]:
    return device.kind, device.speed, device.memory_bytes


def _group_sizes(cluster: Cluster, peers: list[int]) -> list[int]:
    # Devices of the class per group of each level; one where groups hold unequal numbers of them,
    # except for the last group, which may hold fewer.
    sizes = []
    for level in cluster.levels:
        groups: dict[int, int] = {}
        for device in peers:
            group = device // level.group_size
            groups[group] = groups.get(group, 0) + 1
        *full, last = groups.values()
        is_regular = all(count == full[0] for count in full) and last <= (full or [last])[0]
        sizes.append((full or [last])[0] if is_regular else 1)
    return [*sizes[:-1], len(peers)] if sizes else []
