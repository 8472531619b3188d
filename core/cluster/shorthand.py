"""Cluster shorthand, read and written: ``4x24GB``, ``4x8x80GB``, ``2x80GB,4x24GB``, ``8xH200``.

::

    cluster = part ("," part)*
    part    = [nodes "x"] devices "x" what
    what    = number ("K" | "M" | "G" | "T") ("B" | "iB") | "cpu" | catalogue name

Each part describes devices of one kind, which are named after it. ``24GB`` is a card of that size,
with the memory that such a card reports; sizes that no card of the catalogue has, and those in
other units, are exact. If one part has nodes, all must, with equally many devices per node:
`INSIDE_NODE` then joins the devices of a node and `BETWEEN_NODES` the nodes. Otherwise one link
joins all devices, except that more named devices than a usual node holds are taken as nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby

from ..errors import InvalidInput
from .accelerators import Accelerator, find_card_bytes, get_accelerator
from .cluster import Cluster, Device, LinkLevel
from .collectives import find_slowest, load_link_table, shares_lanes
from .places import NETWORK, NODE

UNIT_BYTES = {
    "kb": 10**3, "kib": 2**10, "mb": 10**6, "mib": 2**20,
    "gb": 10**9, "gib": 2**30, "tb": 10**12, "tib": 2**40,
}  # fmt: skip

LARGEST_BYTES = 2**60
"""Upper bound of `Device.memory_bytes`."""

INSIDE_NODE = LinkLevel(name=NODE, group_size=1, latency_s=3.4e-6, bandwidth_bytes_per_s=300e9)
"""NVLink 3 as in an A100: 600 GB/s for both directions together (NVIDIA's data sheet). The latency
is NCCL's constant for a ring over NVLink and large messages (3.4 us, ``tuning.cc``)."""

BETWEEN_NODES = LinkLevel(name=NETWORK, group_size=1, latency_s=14e-6, bandwidth_bytes_per_s=25e9)
"""200 Gb/s per device (HDR InfiniBand; a DGX A100 has a card for each). The latency is NCCL's
constant for a network and large messages (14 us)."""

MAX_RUNS = 4
"""Most runs of equal devices listed in one line."""

MAX_KIND = 40
"""Most characters shown of a device's kind."""

# Every repetition is bounded, and only ASCII digits count: the text may come from a request. A name
# may begin with three or four digits (910B, 7900XTX), so nodes are read only where no name fits.
_PART = re.compile(
    r"(?:(?P<nodes>\d{1,9})x)??(?P<devices>\d{1,9})x"
    r"(?:(?P<size>\d{1,9}(?:\.\d{1,6})?)(?P<unit>[KMGT]i?B)|(?P<cpu>cpu)"
    r"|(?P<name>[a-z][\w.-]{1,30}|(?!\d{3,4}x(?!t?x?(?![\w.-])))\d{3,4}[a-z][\w.-]{0,27}|\d{4}))",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class _Part:
    """Equal devices; ``num_nodes`` is `None` if no nodes are written."""

    num_nodes: int | None
    num_devices: int
    kind: str
    memory_bytes: int | None
    accelerator: Accelerator | None = None

    @property
    def count(self) -> int:
        return (1 if self.num_nodes is None else self.num_nodes) * self.num_devices


def parse_devices(text: str, *, max_devices: int = 2**20) -> Cluster:
    """Parse shorthand; see `Cluster.parse`."""
    parts = [_parse_part(piece.strip(), text) for piece in text.split(",", maxsplit=1000)]
    named = [part.accelerator for part in parts if part.accelerator]
    if named and len(named) < len(parts):
        raise _invalid(
            text, "mixes named devices with memory sizes; name every kind, such as '2xH200,4xL40S'"
        )
    count = sum(part.count for part in parts)
    # Counted before anything is built: '999999999x999999999x24GB' must not fill the memory.
    if not all(part.count for part in parts):
        raise _invalid(text, "has 0 devices of a kind; give at least one")
    if count > max_devices:
        raise _invalid(text, f"has {count} devices; shorthand is limited to {max_devices}")
    parts, assumptions = _split_into_nodes(parts, text)
    names: Counter[str] = Counter()
    devices = []
    for part in parts:
        for _ in range(part.count):
            name = f"{part.kind}:{names[part.kind]}"
            devices.append(Device(name=name, kind=part.kind, memory_bytes=part.memory_bytes))
            names[part.kind] += 1
    levels = _build_levels(text, parts, named, count)
    return Cluster(devices=tuple(devices), levels=levels, assumptions=assumptions)


def format_devices(cluster: Cluster) -> str:
    """Count the devices of each kind, in order: ``8 x H100``, ``2 x 80GB, 4 x 24GB``."""
    runs = [
        (kind[:MAX_KIND], len(list(run)))
        for kind, run in groupby(cluster.devices, key=lambda one: one.kind)
    ]
    shown = [f"{number} x {kind}" for kind, number in runs[:MAX_RUNS]]
    more = [f"{len(runs) - MAX_RUNS} more runs"] if len(runs) > MAX_RUNS else []
    return ", ".join([*shown, *more])


def enlarge(cluster: Cluster, count: int) -> tuple[str, Cluster] | None:
    """Return shorthand of at least ``count`` devices like these, and the cluster it describes.

    Nodes are whole, where there are several. `None` for a cluster that is not what shorthand of one
    kind describes.
    """
    kind = cluster.devices[0].kind

    def write(number: int, size: int | None) -> str:
        return f"{number // size}x{size}x{kind}" if size else f"{number}x{kind}"

    for size in (None, 1, *(link.group_size for link in cluster.levels[:1])):
        try:
            same = parse_devices(write(len(cluster.devices), size))
            accelerator = _parse_part(f"1x{kind}", kind).accelerator
        except InvalidInput:
            continue
        if same.model_copy(update={"assumptions": cluster.assumptions}) == cluster:
            node = size or (accelerator.node_devices if accelerator else count)
            text = write(-(-count // node) * node if size or count > node else count, size)
            return text, parse_devices(text)
    return None


def _parse_part(piece: str, text: str) -> _Part:
    match = _PART.fullmatch(piece)
    if match is None:
        raise InvalidInput(
            f"cannot parse devices {_quoted(text)}; write '4x24GB', '8x80GiB' or '2xcpu', '8xH200' "
            "by name, '4x8x80GB' for 4 nodes of 8, '2x80GB,4x24GB' for several kinds, or give a "
            "cluster file (docs/guides/clusters.md)"
        )
    nodes = int(match["nodes"]) if match["nodes"] else None
    devices = int(match["devices"])
    if match["name"]:
        entry = get_accelerator(match["name"])
        return _Part(nodes, devices, entry.name, entry.memory_bytes or None, entry)
    if match["cpu"]:
        return _Part(nodes, devices, "cpu", None)
    unit, size = match["unit"].lower(), float(match["size"])
    card_bytes = find_card_bytes(size) if unit == "gb" else None
    memory_bytes = card_bytes or int(size * UNIT_BYTES[unit])
    if memory_bytes > LARGEST_BYTES:
        raise _invalid(text, "has more than 1 EiB of memory per device")
    return _Part(nodes, devices, match["size"] + match["unit"], memory_bytes)


def _split_into_nodes(parts: list[_Part], text: str) -> tuple[list[_Part], tuple[str, ...]]:
    """Split more named devices than one node holds into the largest usual nodes, and say so."""
    most = min((part.accelerator.node_devices for part in parts if part.accelerator), default=0)
    if not most or any(part.num_nodes for part in parts) or sum(p.count for p in parts) <= most:
        return parts, ()
    if any(part.num_devices % most for part in parts):
        raise _invalid(
            text,
            f"has more devices than the {most} of the largest usual node, and is not made of such "
            "nodes; write which it has, such as '2x6xH100' for 2 nodes of 6 and '1x12xH100' for "
            "one of 12, or give a cluster file (docs/guides/clusters.md)",
        )
    parts = [replace(p, num_nodes=p.num_devices // most, num_devices=most) for p in parts]
    taken = ",".join(f"{part.num_nodes}x{most}x{part.kind}" for part in parts)
    return parts, (
        f"{_quoted(text)} is taken as {taken!r}, as the largest usual node has {most} devices; "
        f"devices that share one node's links are written with the number of nodes in front, "
        f"such as '1x{parts[0].count}x{parts[0].kind}'",
    )


def _build_levels(
    text: str, parts: list[_Part], named: list[Accelerator], count: int
) -> tuple[LinkLevel, ...]:
    """Build the link levels: inside nodes and between them, or one for all devices."""
    sizes = {part.num_devices if part.num_nodes else None for part in parts}
    if len(sizes) > 1:
        raise _invalid(
            text,
            "mixes nodes of different sizes, or nodes with single devices; write every part as "
            "nodes x devices x kind with equally many devices per node, such as "
            "'2x8x80GB,4x8x24GB', or give a cluster file (docs/guides/clusters.md)",
        )
    has_nodes = sizes != {None}
    inside = INSIDE_NODE if has_nodes else LinkLevel(group_size=count)
    size = parts[0].num_devices if has_nodes else count
    if named:
        # Devices of several kinds take the longest delays and the lowest bandwidth of their links,
        # so that together they are no faster than either.
        table = load_link_table()
        links = [
            table[entry.link].limit_to_node(size, share_lanes=shares_lanes(entry.link))
            for entry in named
        ]
        messages = [
            figures.price_messages(entry.link_bandwidth_bytes_per_s)
            for figures, entry in zip(links, named, strict=True)
        ]
        slowest = min(named, key=lambda entry: table[entry.link].bus_bandwidth(size)).link
        inside = INSIDE_NODE.model_copy(
            update={
                "name": slowest,
                "latency_s": max(latency_s for latency_s, _ in messages),
                "bandwidth_bytes_per_s": min(bandwidth for _, bandwidth in messages),
                "all_reduce": find_slowest(links),
                "error_band": max(table[entry.link].error_band for entry in named) or None,
            }
        )
    levels = []
    # As in `Cluster.of_nodes`: no level for groups of one device, unless it is the only one.
    if size > 1 or count == 1:
        levels.append(inside.model_copy(update={"group_size": size}))
    if count > size:
        levels.append(BETWEEN_NODES.model_copy(update={"group_size": count}))
    return tuple(levels)


def _invalid(text: str, reason: str) -> InvalidInput:
    return InvalidInput(f"{_quoted(text)} {reason}", field="/devices")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")
