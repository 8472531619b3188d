"""Clusters of devices from the catalogue: ``8xH200``, ``4x8xH100``, ``2xH200,4xL40S``.

::

    cluster = part ("," part)*
    part    = [nodes "x"] devices "x" kind

The kinds are those of `core.accelerators`; their memory and links are those of their data sheets.
Devices of one node, or all where no nodes are written, are joined by the slowest of their links;
nodes by `cluster_shorthand.BETWEEN_NODES`.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import repeat

from ..errors import InvalidInput
from .accelerators import Accelerator, accelerator
from .cluster import Cluster, Device, LinkLevel
from .shorthand import BETWEEN_NODES, INSIDE_NODE, parse

_PART = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([A-Za-z][\w.-]{1,30}|\d{4}[A-Za-z]?)")


def parse_devices(text: str, *, max_devices: int = 2**20) -> Cluster:
    """See `Cluster.parse`.

    Raises:
        InvalidInput: The text is no shorthand, or names a device that is not in the catalogue.
    """
    pieces = [piece.strip() for piece in text.split(",", maxsplit=1000)]
    matches = [_PART.fullmatch(piece) for piece in pieces]
    named = [match for match in matches if match and match[3].lower() != "cpu"]
    if not named:
        return parse(text, max_devices=max_devices)
    if len(named) < len(pieces):
        raise InvalidInput(
            f"{text!r} mixes named devices with memory sizes; name every kind, such as "
            "'2xH200,4xL40S'",
            field="/devices",
        )
    kinds = [accelerator(match[3]) for match in named]
    nodes = [int(match[1]) if match[1] else None for match in named]
    sizes = [int(match[2]) for match in named]
    count = sum((number or 1) * size for number, size in zip(nodes, sizes, strict=True))
    if not all(sizes) or 0 in nodes or count > max_devices:
        raise InvalidInput(
            f"{text!r} says {count} devices; between 1 of each kind and {max_devices} in all "
            "can be written in shorthand",
            field="/devices",
        )
    names: Counter[str] = Counter()
    devices = []
    for kind, number, size in zip(kinds, nodes, sizes, strict=True):
        for _ in repeat(None, (number or 1) * size):
            devices.append(_device(kind, names[kind.name]))
            names[kind.name] += 1
    return Cluster(devices=tuple(devices), levels=_levels(text, kinds, nodes, sizes, count))


def _device(kind: Accelerator, number: int) -> Device:
    return Device(
        name=f"{kind.name}:{number}", kind=kind.name, memory_bytes=kind.memory_bytes or None
    )


def _levels(
    text: str,
    kinds: list[Accelerator],
    nodes: list[int | None],
    sizes: list[int],
    count: int,
) -> tuple[LinkLevel, ...]:
    slowest = min(kinds, key=lambda kind: kind.link_bandwidth_bytes_per_s)
    inside = LinkLevel(
        name=slowest.link,
        group_size=count if nodes[0] is None else sizes[0],
        latency_s=INSIDE_NODE.latency_s,
        bandwidth_bytes_per_s=slowest.link_bandwidth_bytes_per_s,
    )
    if set(nodes) == {None}:
        return (inside,)
    if None in nodes or len(set(sizes)) > 1:
        raise InvalidInput(
            f"{text!r} mixes nodes of different sizes, or nodes with single devices; write every "
            "part as nodes x devices x kind with equally many devices a node",
            field="/devices",
        )
    between = BETWEEN_NODES.model_copy(update={"group_size": count})
    if count == sizes[0]:
        return (inside,)
    return (inside, between) if sizes[0] > 1 else (between,)
