"""Times of all-reduces over the links of a catalogue device, by message size and devices.

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
from functools import cache
from importlib.resources import files
from itertools import pairwise
from math import log
from typing import Literal

from pydantic import Field

from ..document import Record


class LinkFigures(Record):
    """Figures of one kind of link; seconds and bytes per second.

    Attributes:
        small_share: Of the bandwidth, what the protocol for small messages reaches.
        bandwidth: Bus bandwidth of large messages, by number of devices.
        error_band: Relative error that at least 90 % of the rows fitted to keep to, every host
            weighing the same, and no less than another host of the kind may differ; of a rule or a
            guess, of all links predicted so.
    """

    basis: Literal["table", "rule", "guess"]
    source: str
    start_s: float = Field(ge=0)
    step_s: float = Field(ge=0)
    small_share: float = Field(gt=0, le=1)
    large_start_s: float = Field(ge=0)
    large_step_s: float = Field(ge=0)
    bandwidth: dict[int, float] = Field(min_length=1)
    error_band: float

    def bus_bandwidth(self, num_devices: int) -> float:
        """Return the bandwidth of large messages, between the counts measured by its logarithm."""
        counts = sorted(self.bandwidth)
        if num_devices <= counts[0]:
            return self.bandwidth[counts[0]]
        for low, high in pairwise(counts):
            if num_devices <= high:
                share = log(num_devices / low) / log(high / low)
                return float(self.bandwidth[low] ** (1 - share) * self.bandwidth[high] ** share)
        return self.bandwidth[counts[-1]]

    def all_reduce_time_s(self, size_bytes: int, num_devices: int) -> float:
        """Return the time of an all-reduce among devices of one node."""
        if num_devices < 2 or not size_bytes:
            return 0.0
        steps = num_devices - 1
        sent = 2 * steps / num_devices * size_bytes
        wire = sent / self.bus_bandwidth(num_devices)
        small = self.start_s + self.step_s * steps + wire / self.small_share
        return min(small, self.large_start_s + self.large_step_s * steps + wire)


@cache
def load_link_table() -> dict[str, LinkFigures]:
    """Read the figures of every kind of link in the catalogue."""
    text = files(__package__).joinpath("tables", "links.json").read_text(encoding="utf-8")
    return {name: LinkFigures.model_validate(entry) for name, entry in json.loads(text).items()}
