"""Link levels (groups of near ranks, from hosts and message times) and devices of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from math import gcd
from statistics import median

from ...core.cluster.cluster import Device
from .records import LevelTimes, RankDevice

APART = 2.0
"""Groups are distinct if every message between them takes this many times as long as every one
inside: repeated measurements of equal links differ by far less."""

MOST_PROBED = 12
"""Most ranks of a host, and most hosts, between which all pairs are timed: 66 pairs."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class RankLevel:
    """Link level: groups of this many consecutive ranks."""

    name: str
    group_size: int


def number_hosts(ranks: Sequence[RankDevice]) -> list[int]:
    """Return the host number of each rank, counted from 0 in rank order.

    Ranks are on one host if their launcher, one a host, gave them its number. Where every launcher
    started a single rank, or gave no number, the machine's name decides.
    """
    launched = any((rank.local_ranks or 1) > 1 for rank in ranks)
    found = [
        (rank.host, rank.group_rank) if launched and rank.group_rank is not None else (rank.host,)
        for rank in ranks
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(found))}
    return [numbers[key] for key in found]


def host_size(hosts: Sequence[int]) -> tuple[int, str]:
    """Return how many consecutive ranks share a host, and a remark if hosts are uneven.

    Every host has that many; the last may have fewer. Where hosts hold different numbers it is the
    largest that divides all; 1 where the ranks of a host do not follow each other.
    """
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    if len(runs) > len({host for host, _ in runs}):
        return 1, (
            "ranks of one host do not follow each other, so the links inside hosts are not told "
            "from those between; number the ranks host by host"
        )
    sizes = [size for _, size in runs]
    if len({*sizes[:-1]}) <= 1 and sizes[-1] <= sizes[0]:
        return sizes[0], ""
    common = gcd(*sizes)
    return common, (
        f"hosts hold {', '.join(map(str, sizes))} ranks; a cluster document has groups of one "
        f"size, so only {common} consecutive ranks count as one host"
    )


def list_probes(num_ranks: int, size: int) -> list[Pair]:
    """List the pairs to time to find groups: inside the first host, and between hosts."""
    inside = combinations(range(min(size, num_ranks, MOST_PROBED)), 2)
    firsts = range(0, num_ranks, size)[:MOST_PROBED]
    return [*inside, *combinations(firsts, 2)]


def find_levels(num_ranks: int, size: int, times_s: Mapping[Pair, float]) -> list[RankLevel]:
    """Find the levels of a cluster, innermost first.

    Hosts of ``size`` ranks are a level of their own; inside a host, and among hosts, further levels
    are found where the times of equal messages between the pairs of `list_probes` fall apart.
    """
    if num_ranks < 2:
        return []
    size = min(size, num_ranks)
    levels = []
    if size > 1:
        inside = {pair: time_s for pair, time_s in times_s.items() if max(pair) < size}
        levels += [
            RankLevel(f"group of {joined}", joined) for joined in find_group_sizes(size, inside)
        ]
        levels.append(RankLevel("node", size))
    hosts = -(-num_ranks // size)
    if hosts > 1:
        between = {
            (one // size, other // size): time_s
            for (one, other), time_s in times_s.items()
            if one % size == other % size == 0
        }
        levels += [
            RankLevel(f"{joined} nodes", joined * size)
            for joined in find_group_sizes(hosts, between)
        ]
        levels.append(RankLevel("network", hosts * size))
    return levels


def find_group_sizes(count: int, times_s: Mapping[Pair, float]) -> list[int]:
    """Return ascending sizes of groups of consecutive members that are clearly nearer.

    From the outermost in: the largest divisor of the group so far for which every message across
    takes at least `APART` times every message inside.
    """
    found: list[int] = []
    outer = count
    # Outermost first: once a size is found, pairs across it are left out of the next comparison,
    # or the slowest links would hide the faster levels inside.
    for size in range(count // 2, 1, -1):
        if outer % size:
            continue
        inside = [time_s for (a, b), time_s in times_s.items() if a // size == b // size]
        across = [
            time_s
            for (a, b), time_s in times_s.items()
            if a // size != b // size and a // outer == b // outer
        ]
        if inside and across and max(inside) * APART <= min(across):
            found.append(size)
            outer = size
    return found[::-1]


SCATTERED = 1.5
"""Ratio of the median to the fastest run from which a remark is made."""


def describe_devices(ranks: Sequence[RankDevice]) -> tuple[Device, ...]:
    """Describe the ranks as devices; CPU ranks share their host's memory evenly."""
    hosts = number_hosts(ranks)
    held = {host: hosts.count(host) for host in hosts}
    machines = {number: rank.host for number, rank in zip(hosts, ranks, strict=True)}
    if len(set(machines.values())) < len(machines):
        machines = {number: f"node{number}" for number in machines}
    devices = []
    for number, rank in zip(hosts, ranks, strict=True):
        name = rank.device if rank.device != "cpu" else f"cpu:{rank.local_rank}"
        memory = rank.memory_bytes
        if memory is not None and rank.device == "cpu":
            memory //= held[number]
        name = name if len(held) == 1 else f"{machines[number]}/{name}"
        devices.append(Device(name=name, kind=rank.kind, memory_bytes=memory))
    names = [device.name for device in devices]
    if len(set(names)) < len(names):  # no launcher's local ranks
        return tuple(
            device.model_copy(update={"name": f"{device.name}#{index}"})
            for index, device in enumerate(devices)
        )
    return tuple(devices)


def remarks(devices: Sequence[Device]) -> list[str]:
    """List what a reader of the cluster should know about its devices."""
    kinds = sorted({device.kind for device in devices})
    found = []
    if len(kinds) > 1:
        found.append(
            f"devices of different kinds ({', '.join(kinds)}) are written with equal speed; set "
            "'speed' in the file, from a profile of each"
        )
    cores = os.cpu_count() or 1
    if "cpu" in kinds and len(devices) > cores:
        found.append(
            f"{len(devices)} CPU ranks were measured by {cores} cores here; ranks that wait for a "
            "core look like slow links"
        )
    return found


def scatter(levels: Sequence[LevelTimes]) -> str:
    """Return a remark if most times were far above the fastest."""
    ratios = [
        entry.time_s / entry.least_s for level in levels for entry in level.times if entry.least_s
    ]
    if not ratios or median(ratios) < SCATTERED:
        return ""
    return (
        f"times scattered: half of the medians were {median(ratios):.1f} times their fastest run "
        "or more, so other work was in the way; measure again when the machines are quiet"
    )
