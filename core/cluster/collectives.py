"""Times of all-reduces by message size and number of devices.

Libraries change protocol with the size: one with little delay and a fraction of the bandwidth for
small messages, another for large ones. The time is the shorter of both, each a straight line in
the bytes that every device sends (NCCL's "bus bytes", 2 (n - 1) / n of the message)::

    small = start + step (n - 1) + bus bytes / (small share x bandwidth(n))
    large = start' + step' (n - 1) + bus bytes / bandwidth(n)

`tables/links.json` has the figures by kind of link, each with its source: fitted to measurements
(``table``), scaled from the nearest kind that was measured or computed from constants of the
communication library (``rule``), or assumed (``guess``).
Cards of a host without a switch share its PCIe lanes, so that their bandwidth falls with n. Hosts
differ by up to ten times in that: the table has their middle, with its band.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..document import Record

DELAYS = ("start_s", "step_s", "large_start_s", "large_step_s")
"""Fields of `AllReduceFigures` that are delays."""

MAX_KNOTS = 64
MAX_COUNTED = 128
"""Largest number of devices for which a bandwidth can be given."""

Knot = tuple[
    Annotated[int, Field(ge=2, le=MAX_COUNTED)],
    Annotated[float, Field(ge=1)],
]


class AllReduceFigures(Record):
    """Times of all-reduces over one link by size and number of devices; seconds and bytes/s.

    Attributes:
        start_s: Time of the protocol for small messages before anything is sent.
        step_s: Time it adds for each device after the first.
        small_share: Share of ``bandwidth`` that the protocol for small messages reaches.
        large_start_s: As ``start_s``, of the protocol for large messages; the same if left out.
        large_step_s: As ``step_s``, of the protocol for large messages; the same if left out.
        bandwidth: Bus bandwidth of large messages, as pairs of a number of devices and bytes/s.
    """

    start_s: float = Field(0.0, ge=0)
    step_s: float = Field(0.0, ge=0)
    small_share: float = Field(1.0, ge=1e-6, le=1)
    large_start_s: float = Field(default_factory=lambda data: data.get("start_s", 0.0), ge=0)
    large_step_s: float = Field(default_factory=lambda data: data.get("step_s", 0.0), ge=0)
    bandwidth: tuple[Knot, ...] = Field(min_length=1, max_length=MAX_KNOTS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        counts = [count for count, _ in self.bandwidth]
        if counts != sorted(set(counts)):
            raise ValueError(f"numbers of devices must rise, and these are {counts}")
        return self

    def bus_bandwidth(self, num_devices: int) -> float:
        """Return the bandwidth of large messages.

        Between two numbers given it is a power of the number, beyond them that of the nearest.
        """
        if num_devices <= self.bandwidth[0][0]:
            return self.bandwidth[0][1]
        for (low, slow), (high, fast) in pairwise(self.bandwidth):
            if num_devices <= high:
                share = math.log(num_devices / low) / math.log(high / low)
                return float(slow ** (1 - share) * fast**share)
        return self.bandwidth[-1][1]

    def all_reduce_time_s(self, size_bytes: float, num_devices: int) -> float:
        """Return the time of an all-reduce: the shorter of the two protocols."""
        if num_devices < 2 or not size_bytes:
            return 0.0
        bandwidth = self.bus_bandwidth(num_devices)
        messages, part = 2 * (num_devices - 1), size_bytes / num_devices
        return min(
            start_s + messages * (delay_s + part / (share * bandwidth))
            for start_s, delay_s, share in self.protocols
        )

    def price_messages(self, rate: float) -> tuple[float, float]:
        """Return the latency and the bandwidth of a message from one device to another.

        An all-reduce of two devices is two exchanges of half the bytes, one after the other. A
        message takes the start and one exchange of the protocol for large messages, at no more
        than ``rate``, the data sheet's. Messages of less than some 64 KiB take less.
        """
        return self.large_start_s + self.large_step_s / 2, min(rate, self.bus_bandwidth(2))

    @property
    def protocols(self) -> tuple[tuple[float, float, float], ...]:
        """Return the start, the delay of each of 2 (n - 1) messages and the share of bandwidth."""
        return (
            (self.start_s, self.step_s / 2, self.small_share),
            (self.large_start_s, self.large_step_s / 2, 1.0),
        )

    def limit_to_node(self, num_devices: int, *, share_lanes: bool = False) -> AllReduceFigures:
        """Return the figures for a node of so many devices.

        Devices that share the lanes of their host get no more than when all of them send: those of
        other stages send at the same time.
        """
        whole = self.bus_bandwidth(num_devices)
        most = whole if share_lanes else math.inf
        knots = [(count, min(rate, most)) for count, rate in self.bandwidth if count < num_devices]
        if num_devices <= self.bandwidth[-1][0]:
            knots.append((max(num_devices, 2), whole))
        own = {name: getattr(self, name) for name in AllReduceFigures.model_fields}
        return AllReduceFigures(**own | {"bandwidth": tuple(knots)})

    def scale(self, *, bandwidth_factor: float = 1.0, delay_factor: float = 1.0) -> Self:
        """Return the figures with bandwidths and delays multiplied by two factors."""
        change: dict[str, object] = {name: delay_factor * getattr(self, name) for name in DELAYS}
        change["bandwidth"] = tuple((n, bandwidth_factor * rate) for n, rate in self.bandwidth)
        return self.model_copy(update=change)


def find_slowest(links: Sequence[AllReduceFigures]) -> AllReduceFigures:
    """Return the longest delays and the lowest bandwidth for every number of devices."""
    counts = sorted({count for figures in links for count, _ in figures.bandwidth})
    delays = {name: max(getattr(figures, name) for figures in links) for name in DELAYS}
    return AllReduceFigures(
        **delays,
        small_share=min(figures.small_share for figures in links),
        bandwidth=tuple(
            (count, min(figures.bus_bandwidth(count) for figures in links)) for count in counts
        ),
    )


class LinkFigures(AllReduceFigures):
    """Figures of one kind of link.

    Attributes:
        error_band: Relative error that at least 90 % of the rows fitted to keep to, every host
            weighing the same, and no less than another host of the kind may differ; of a rule or a
            guess, of all links predicted so.
    """

    basis: Literal["table", "rule", "guess"]
    source: str
    error_band: float


def shares_lanes(link: str) -> bool:
    """Return True if the cards of a host share its path for this kind of link."""
    return link.startswith("PCIe")


@cache
def load_link_table() -> dict[str, LinkFigures]:
    """Read the figures of every kind of link in the catalogue."""
    text = files(__package__).joinpath("tables", "links.json").read_text(encoding="utf-8")
    return {name: LinkFigures.model_validate(entry) for name, entry in json.loads(text).items()}
