"""Plain-text tables of a cluster: its devices, then its links."""

from __future__ import annotations

from itertools import groupby

from ..text_table import format_table
from ..units import format_bytes, format_time
from .cluster import Cluster, Device


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


def _what(device: Device) -> tuple[str, int | None, float]:
    return device.kind, device.memory_bytes, device.speed
