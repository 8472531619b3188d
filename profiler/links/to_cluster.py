"""The devices of a measured cluster, and what a reader should know about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median

from ...core.cluster.cluster import Device
from .levels import number_hosts
from .records import LevelTimes, RankDevice

SCATTERED = 1.5
"""Medians so many times above the fastest run are remarked upon."""


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
