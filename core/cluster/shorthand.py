"""Clusters as one writes them in a hurry: ``4x24GB``, ``4x8x80GB``, ``2x80GB,4x24GB``.

::

    cluster = part ("," part)*
    part    = [nodes "x"] devices "x" what
    what    = number ("MB" | "MiB" | "GB" | "GiB" | "TB" | "TiB") | "cpu"

Each part is devices of one kind, named after what they are. With nodes, every part says how many
and all nodes hold equally many devices; `INSIDE_NODE` joins a node's, `BETWEEN_NODES` the nodes.
Without, one link of the defaults of `LinkLevel` joins all.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import repeat

from ..errors import InvalidInput
from .accelerators import Accelerator, get_accelerator
from .cluster import Cluster, Device, LinkLevel

UNIT_BYTES = {
    "mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": 2**30, "tb": 10**12, "tib": 2**40,
}  # fmt: skip

LARGEST_BYTES = 2**60
"""What `Device.memory_bytes` takes."""

INSIDE_NODE = LinkLevel(name="node", group_size=1, latency_s=3.4e-6, bandwidth_bytes_per_s=300e9)
"""NVLink 3 as in an A100: 600 GB/s in both directions together (NVIDIA's data sheet). The latency
is what NCCL reckons with for a ring over NVLink and large messages (3.4 us, ``tuning.cc``)."""

BETWEEN_NODES = LinkLevel(name="network", group_size=1, latency_s=14e-6, bandwidth_bytes_per_s=25e9)
"""200 Gb/s a device (HDR InfiniBand; a DGX A100 has a card for each). The latency is what NCCL
reckons with for a network and large messages (14 us)."""

_PART = re.compile(
    r"(?:(\d{1,9})x)?(\d{1,9})x(?:(\d{1,30}(?:\.\d{1,30})?)([MGT]i?B)|(cpu))",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class _Part:
    """Equal devices; ``num_nodes`` is `None` where no nodes are written."""

    num_nodes: int | None
    num_devices: int
    kind: str
    memory_bytes: int | None

    @property
    def count(self) -> int:
        return (self.num_nodes or 1) * self.num_devices


def parse(text: str, *, max_devices: int) -> Cluster:
    """A cluster of devices that are told by their memory; see `Cluster.parse` for the others too.

    Raises:
        InvalidInput: The text is not shorthand, or says more devices than are allowed.
    """
    parts = [_part(piece.strip(), text) for piece in text.split(",", maxsplit=1000)]
    count = sum(part.count for part in parts)
    if count > max_devices:
        raise InvalidInput(
            f"{_clipped(text)} are {count} devices; at most {max_devices} can be written in "
            "shorthand"
        )
    names: Counter[str] = Counter()
    devices = []
    for part in parts:
        for _ in range(part.count):
            devices.append(
                Device(
                    name=f"{part.kind}:{names[part.kind]}",
                    kind=part.kind,
                    memory_bytes=part.memory_bytes,
                )
            )
            names[part.kind] += 1
    return Cluster(devices=tuple(devices), levels=_levels(parts, count, text))


def _part(piece: str, text: str) -> _Part:
    match = _PART.fullmatch(piece)
    if match is None:
        raise InvalidInput(
            f"cannot read devices {_clipped(text)}; write '4x24GB', '8x80GiB' or '2xcpu', "
            "'8xH200' by name, '4x8x80GB' for 4 nodes of 8, '2x80GB,4x24GB' for several kinds, or "
            "give a cluster file (docs/clusters.md)"
        )
    nodes, devices, size, unit, cpu = match.groups()
    if int(devices) == 0 or (nodes and int(nodes) == 0):
        raise InvalidInput(f"{_clipped(text)} says 0 devices; a cluster needs at least one")
    memory_bytes = None if cpu else int(float(size) * UNIT_BYTES[unit.lower()])
    if memory_bytes is not None and memory_bytes > LARGEST_BYTES:
        raise InvalidInput(f"{_clipped(text)} says more memory than 1 EiB a device")
    return _Part(
        num_nodes=int(nodes) if nodes else None,
        num_devices=int(devices),
        kind="cpu" if cpu else f"{size}{unit}",
        memory_bytes=memory_bytes,
    )


def _levels(parts: list[_Part], count: int, text: str) -> tuple[LinkLevel, ...]:
    """The links: inside nodes and between them, or one."""
    sizes = {part.num_devices if part.num_nodes else None for part in parts}
    if sizes == {None}:
        return (LinkLevel(group_size=count),)
    if len(sizes) > 1:
        raise InvalidInput(
            f"{_clipped(text)} mixes nodes of different sizes, or nodes with single devices; "
            "write every part as nodes x devices x memory with equally many devices a node, such "
            "as '2x8x80GB,4x8x24GB', or give a cluster file (docs/clusters.md)"
        )
    size = parts[0].num_devices
    levels = []
    if size > 1 or count == 1:
        levels.append(INSIDE_NODE.model_copy(update={"group_size": size}))
    if count > size:
        levels.append(BETWEEN_NODES.model_copy(update={"group_size": count}))
    return tuple(levels)


def _clipped(text: str) -> str:
    """The text as it stands in an error."""
    return repr(text if len(text) <= 60 else text[:60] + "...")


_NAMED_PART = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([A-Za-z][\w.-]{1,30}|\d{4}[A-Za-z]?)")


def parse_devices(text: str, *, max_devices: int = 2**20) -> Cluster:
    """See `Cluster.parse`.

    Raises:
        InvalidInput: The text is no shorthand, or names a device that is not in the catalogue.
    """
    pieces = [piece.strip() for piece in text.split(",", maxsplit=1000)]
    matches = [_NAMED_PART.fullmatch(piece) for piece in pieces]
    named = [match for match in matches if match and match[3].lower() != "cpu"]
    if not named:
        return parse(text, max_devices=max_devices)
    if len(named) < len(pieces):
        raise InvalidInput(
            f"{text!r} mixes named devices with memory sizes; name every kind, such as "
            "'2xH200,4xL40S'",
            field="/devices",
        )
    kinds = [get_accelerator(match[3]) for match in named]
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
    return Cluster(devices=tuple(devices), levels=_named_levels(text, kinds, nodes, sizes, count))


def _device(kind: Accelerator, number: int) -> Device:
    return Device(
        name=f"{kind.name}:{number}", kind=kind.name, memory_bytes=kind.memory_bytes or None
    )


def _named_levels(
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
