"""Plain-text tables of a cluster: its devices, then its links."""

from __future__ import annotations

from itertools import groupby

from ..text_table import format_table
from ..units import format_bytes, format_time
from .cluster import Cluster, Device

MAX_RUNS = 4
"""Most runs of equal devices listed in one line."""

MAX_KIND = 40
"""Most characters shown of a device's kind."""


def format_cluster(cluster: Cluster) -> str:
    """Format a cluster: runs of equal devices, then the links from the innermost level outwards."""
    rows = [("devices", "count", "kind", "memory limit", "speed")]
    for (kind, memory_bytes, speed), run in groupby(cluster.devices, key=_what):
        names = [device.name for device in run]
        rows.append(
            (
                names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}",
                str(len(names)),
                kind,
                "none" if memory_bytes is None else format_bytes(memory_bytes),
                f"x {speed:g}",
            )
        )
    links = [
        (
            level.name,
            f"{level.group_size}, shared" if level.shared else str(level.group_size),
            format_time(level.latency_s),
            f"{format_bytes(level.bandwidth_bytes_per_s)}/s",
            f"{format_bytes(level.all_reduce_bandwidth_bytes_per_s)}/s"
            if level.all_reduce_bandwidth_bytes_per_s
            else "as bandwidth",
        )
        for level in cluster.levels
    ]
    text = format_table(rows)
    if links:
        headings = ("link", "joins", "latency", "bandwidth", "all-reduce")
        text += "\n\n" + format_table([headings, *links])
    return text


def format_devices(cluster: Cluster) -> str:
    """Count the devices of each kind, in order: ``8 x H100``, ``2 x 80GB, 4 x 24GB``."""
    runs = [
        (kind[:MAX_KIND], len(list(run)))
        for kind, run in groupby(cluster.devices, key=lambda one: one.kind)
    ]
    shown = [f"{number} x {kind}" for kind, number in runs[:MAX_RUNS]]
    more = [f"{len(runs) - MAX_RUNS} more runs"] if len(runs) > MAX_RUNS else []
    return ", ".join([*shown, *more])


def _what(device: Device) -> tuple[str, int | None, float]:
    return device.kind, device.memory_bytes, device.speed
