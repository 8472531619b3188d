"""Clusters: devices in pipeline order, and links by level."""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..document import Document, LongTuple, Name, NonEmptyTuple, Notes, Record
from ..errors import InvalidInput
from ..text_table import format_table
from ..units import format_bytes, format_time
from .collectives import AllReduceFigures
from .pair_links import PairLink, check_pair_links, list_pair_links, number_pair_links
from .places import (
    check_places,
    group_of,
    largest_groups,
    list_groups,
    list_sizes,
    remove_devices,
)

DEFAULT_LATENCY_S = 10e-6
DEFAULT_BANDWIDTH_BYTES_PER_S = 12e9
"""Assumed if no link is described, as in '4x24GB'.

The bandwidth is what NCCL assumes for PCIe 3.0 x16 (``PCI_BW`` of its ``topo.h``), as fast as 4.0
x8; the latency is a guess."""

MAX_GROUP_SIZE = 2**30
MAX_LEVELS = 32
"""Each level joins at least twice as many devices as the one before."""

MAX_SHOWN = 4
"""Most numbers of devices whose all-reduces are printed."""

MAX_PAIR_LINKS = 100_000
"""All pairs of 450 nodes."""


class Device(Record):
    """One accelerator (or one CPU rank).

    Attributes:
        kind: Free text such as ``cpu``, ``A100-80GB``; one profile is valid for one kind.
        memory_bytes: What may be used on it; `None` for no limit.
        speed: How many times faster than the device that was profiled.
        place: Its group at each level without a ``group_size``, by the level's name, such as
            ``{"node": "2", "rack": "b"}``.
    """

    name: Name
    kind: Name = "device"
    memory_bytes: int | None = Field(None, ge=0, le=2**60)
    speed: float = Field(1.0, ge=1e-6, le=1e6)
    place: dict[Name, Name] = Field(
        default_factory=dict, max_length=MAX_LEVELS, exclude_if=lambda place: not place
    )


class LinkLevel(Record):
    """Link between devices that first meet at this level.

    Attributes:
        group_size: Consecutive devices joined by this level; the outermost holds all. `None` joins
            the devices with one ``place`` at this level; all devices, on the outermost level.
        latency_s: One-way delay of an empty message.
        bandwidth_bytes_per_s: Point-to-point, one direction.
        all_reduce_bandwidth_bytes_per_s: Bytes each device moves per second in an all-reduce;
            the point-to-point bandwidth if not known.
        all_reduce: Times of all-reduces by size and number of devices, in place of those of a ring
            of one bandwidth.
        shared: Whether all devices of one inner group use one connection at this level (one
            network card a node), so that their messages queue in the simulation.
        error_band: Relative error to expect of its all-reduces; `None` if not known.
    """

    name: Name = "link"
    group_size: int | None = Field(None, ge=1, le=MAX_GROUP_SIZE)
    latency_s: float = Field(DEFAULT_LATENCY_S, ge=0)
    bandwidth_bytes_per_s: float = Field(DEFAULT_BANDWIDTH_BYTES_PER_S, gt=0)
    all_reduce_bandwidth_bytes_per_s: float | None = Field(None, gt=0)
    all_reduce: AllReduceFigures | None = Field(None, exclude_if=lambda figures: figures is None)
    shared: bool = False
    error_band: float | None = Field(None, ge=0, exclude_if=lambda band: band is None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.all_reduce and self.all_reduce_bandwidth_bytes_per_s:
            raise ValueError(
                "all-reduces have both all_reduce and all_reduce_bandwidth_bytes_per_s; give one"
            )
        return self

    def transfer_time_s(self, size_bytes: int) -> float:
        """Return the time of one message: latency + bytes / bandwidth, or 0 for no bytes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s if size_bytes else 0.0

    def all_reduce_time_s(self, size_bytes: float, num_ranks: int) -> float:
        """Return the time of an all-reduce: by `all_reduce`, or of a ring.

        A ring sends 2 (n - 1) messages of 1/n of the bytes each (Patarasu and Yuan 2009).
        """
        if num_ranks < 2 or not size_bytes:
            return 0.0
        if self.all_reduce:
            return self.all_reduce.all_reduce_time_s(size_bytes, num_ranks)
        bandwidth = self.all_reduce_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        # n - 1 messages sum, and as many hand out the sums.
        messages = 2 * (num_ranks - 1)
        return messages * (self.latency_s + size_bytes / num_ranks / bandwidth)

    def scale(self, *, bandwidth_factor: float = 1.0, delay_factor: float = 1.0) -> LinkLevel:
        """Return the link with its bandwidths and its delays multiplied by two factors."""
        summed, figures = self.all_reduce_bandwidth_bytes_per_s, self.all_reduce
        return self.model_copy(
            update={
                "latency_s": self.latency_s * delay_factor,
                "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s * bandwidth_factor,
                "all_reduce_bandwidth_bytes_per_s": summed and summed * bandwidth_factor,
                "all_reduce": figures
                and figures.scale(bandwidth_factor=bandwidth_factor, delay_factor=delay_factor),
            }
        )


class Cluster(Document):
    """Devices in pipeline order and the links between them, innermost level first.

    Attributes:
        links: Links between two groups that differ from the level that joins them.
        assumptions: What shorthand left open, and how it was understood, a sentence each.
    """

    SCHEMA: ClassVar[str] = "stagewright.cluster/1"

    schema_version: Literal["stagewright.cluster/1"] = "stagewright.cluster/1"
    devices: NonEmptyTuple[Device]
    levels: LongTuple[LinkLevel] = Field((), max_length=MAX_LEVELS)
    links: LongTuple[PairLink] = Field(
        (), max_length=MAX_PAIR_LINKS, exclude_if=lambda links: not links
    )
    assumptions: Notes = Field((), exclude_if=lambda texts: not texts)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ValueError("device names must be unique")
        check_places(self)
        check_pair_links(self)
        return self

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        kind: str = "device",
        memory_bytes: int | None = None,
        latency_s: float = DEFAULT_LATENCY_S,
        bandwidth_bytes_per_s: float = DEFAULT_BANDWIDTH_BYTES_PER_S,
        all_reduce_bandwidth_bytes_per_s: float | None = None,
    ) -> Cluster:
        """Build a cluster of equal devices, all joined by one link level."""
        if num_devices < 1:
            raise InvalidInput(f"a cluster needs at least one device, not {num_devices}")
        link = LinkLevel(
            group_size=num_devices,
            latency_s=latency_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            all_reduce_bandwidth_bytes_per_s=all_reduce_bandwidth_bytes_per_s,
        )
        return cls.of_nodes(
            1, num_devices, inside=link, between=link, kind=kind, memory_bytes=memory_bytes
        )

    @classmethod
    def of_nodes(
        cls,
        num_nodes: int,
        devices_per_node: int,
        *,
        inside: LinkLevel,
        between: LinkLevel,
        kind: str = "device",
        memory_bytes: int | None = None,
    ) -> Cluster:
        """Build a cluster of equal nodes, with one link level inside a node and one between nodes.

        The ``group_size`` of both levels is replaced.
        """
        if num_nodes < 1 or devices_per_node < 1:
            raise InvalidInput(
                f"a cluster needs at least one node of one device, not {num_nodes} of "
                f"{devices_per_node}"
            )
        count = num_nodes * devices_per_node
        levels = []
        # A group of one device needs no link, but a cluster's only level is kept all the same.
        if devices_per_node > 1 or num_nodes == 1:
            levels.append(inside.model_copy(update={"group_size": devices_per_node}))
        if num_nodes > 1:
            levels.append(between.model_copy(update={"group_size": count}))
        return cls(
            devices=tuple(
                Device(name=f"{kind}:{index}", kind=kind, memory_bytes=memory_bytes)
                for index in range(count)
            ),
            levels=tuple(levels),
        )

    @classmethod
    def parse(cls, text: str, *, max_devices: int = 2**20) -> Cluster:
        """Parse a cluster from shorthand.

        ``4x24GB``, ``8x512MiB`` or ``2xcpu`` (no memory limit) are equal devices on one link;
        ``8xH200`` are devices of the catalogue, with their memory and links; ``4x8x80GB`` are 4
        nodes of 8; ``2x80GB,4x24GB`` are two kinds. `docs/guides/clusters.md` lists the links
        that are assumed; speeds and other links need a cluster file.

        Raises:
            InvalidInput: The text is not shorthand, names an unknown device, or describes more
                devices than ``max_devices``.
        """
        # Imported here, because the parser builds clusters.
        from .shorthand import parse_devices

        return parse_devices(text, max_devices=max_devices)

    def without(self, *devices: int | str) -> Cluster:
        """Return the cluster without these devices, by index or name; the others keep their place.

        A device lost in place leaves its node with one fewer: it does not move later devices into
        other nodes, as a shorter list of devices would.

        Raises:
            InvalidInput: A device does not exist, or none would be left.
        """
        return remove_devices(self, devices)

    def link(self, first: int, second: int) -> LinkLevel:
        """Return the link of two devices' groups, or the innermost level that joins them."""
        if max(first, second) < len(self.devices):
            for index, level in enumerate(self.levels):
                if group_of(self, index, first) == group_of(self, index, second):
                    groups = list_groups(self)
                    inner = groups[index - 1] if index else range(len(self.devices))
                    pair = min(inner[first], inner[second]), max(inner[first], inner[second])
                    return number_pair_links(self, groups).get(index, {}).get(pair, level)
        raise InvalidInput(f"devices {first} and {second} are not joined by any level")

    def all_reduce_time_s(
        self,
        size_bytes: int,
        num_ranks: int,
        level: int,
        group_sizes: tuple[int, ...] = (),
        rings: tuple[tuple[LinkLevel, ...], ...] = (),
    ) -> float:
        """Return the time of a hierarchical all-reduce of consecutive devices.

        Every group of M devices reduce-scatters the bytes in a ring; each device then joins a ring
        over the groups with 1/M of the bytes (Cho et al., "BlueConnect", MLSys 2019). A group that
        is not full counts the ranks it has.

        Args:
            size_bytes: Bytes on every device.
            num_ranks: Number of participating devices.
            level: Index of the level whose group holds them all.
            group_sizes: Participating devices per group of each level; by default all those of the
                largest group.
            rings: Links of the rings of each level, the slowest of which counts; by default the
                level itself.
        """
        # Innermost level first. `inner` devices of one group below act as one member here, and
        # each continues with its share of the bytes.
        sizes = group_sizes or largest_groups(self)
        time_s, size, ranks, inner = 0.0, size_bytes, num_ranks, 1
        for index in range(level + 1):
            members = ranks if index == level else max(1, min(ranks, sizes[index] // inner))
            links = rings[index] if rings else self.levels[index : index + 1]
            time_s += max(link.all_reduce_time_s(size, members) for link in links)
            size, ranks = -(-size // members), -(-ranks // members)
            inner = max(inner, sizes[index])
        return time_s

    def __str__(self) -> str:

        return format_cluster(self)


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
            f"{joined}, shared" if level.shared else joined,
            format_time(level.latency_s),
            f"{format_bytes(level.bandwidth_bytes_per_s)}/s",
            _format_all_reduce(level),
        )
        for level, joined in zip(cluster.levels, list_sizes(cluster), strict=True)
    ]
    links += [
        (
            "",
            link.name,
            format_time(link.latency_s),
            f"{format_bytes(link.bandwidth_bytes_per_s)}/s",
            _format_all_reduce(link),
        )
        for link in list_pair_links(cluster)
    ]
    text = format_table(rows)
    if links:
        headings = ("link", "joins", "latency", "bandwidth", "all-reduce")
        text += "\n\n" + format_table([headings, *links])
    return text


def _format_all_reduce(link: LinkLevel) -> str:
    if link.all_reduce:
        knots = link.all_reduce.bandwidth
        if len(knots) > MAX_SHOWN:
            knots = (knots[0], min(knots, key=lambda knot: knot[1]), knots[-1])
        rates = {rate: count for count, rate in reversed(knots)}
        shown = sorted((count, rate) for rate, count in rates.items())
        return ", ".join(f"{format_bytes(rate)}/s among {count}" for count, rate in shown)
    summed = link.all_reduce_bandwidth_bytes_per_s
    return f"{format_bytes(summed)}/s" if summed else "as bandwidth"


def _what(device: Device) -> tuple[str, int | None, float]:
    return device.kind, device.memory_bytes, device.speed
