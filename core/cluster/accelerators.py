"""Peak rates of accelerators from their makers' data sheets, without torch.

The devices are in ``tables/accelerators.json``. Rates are for dense matrices: sparse rates on a
data sheet are twice as high. Link bandwidths are for one direction, where data sheets usually state
both together: NVLink joins a device to a switch by 6, 12, 18 and 18 links of 25 GB/s, in its fifth
generation of 50; for Infinity Fabric it is the rate of one link between two devices, by AMD's
documentation of MI250 and MI300X (MI100's is assumed to be MI250's). Cards without peer-to-peer
copy through the host's memory. Where no boost clock is stated, it is the peak rate by what a
multiprocessor does in a cycle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, Literal

from ..document import Record
from ..errors import InvalidInput

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
"""Precision of matrix products; with ``tf32`` the tensors themselves are float32."""

Backend = Literal["cuda", "rocm", "cpu"]


class Accelerator(Record):
    """One kind of device.

    Attributes:
        name: Its name on the command line.
        full_name: The maker's name.
        pattern: Regular expression for the name that its driver reports, in lower case.
        aliases: Further names on the command line, in lower case.
        flops_per_s: Peak floating-point operations per second, by precision.
        memory_gb: Its nominal memory, as people name it; 0 for a CPU, which uses the machine's.
        memory_bytes: What torch reports of it: without error correction codes and what the driver
            keeps, but with the context of each process (see `reserves`).
        memory_source: Where that was reported.
        bandwidth_bytes_per_s: Memory bandwidth, reads and writes together.
        link: The interconnect to its neighbours.
        link_bandwidth_bytes_per_s: Bandwidth of that in one direction.
        source: Data sheet and date of the figures.
        num_units: Multiprocessors (compute units), over which a kernel's blocks are spread.
        cache_bytes: Its last level of cache.
        board_watts: Sustained power limit; what bounds the clock under long matrix products.
        node_nm: Feature size of its process by density, which sets the work done per joule (see
            `NODES_NM`).
        walks_columns: Whether its library's products fall back for many columns (before Volta).
        clock_hz: Its boost clock, at which the peak rates are stated.
        node_devices: Devices of the largest node that is usual.
    """

    name: str
    full_name: str
    backend: Backend = "cuda"
    pattern: str
    aliases: tuple[str, ...] = ()
    flops_per_s: dict[Precision, float]
    memory_gb: int = 0
    memory_bytes: int
    memory_source: str = ""
    bandwidth_bytes_per_s: float
    link: str
    link_bandwidth_bytes_per_s: float
    source: str
    num_units: int = 1
    cache_bytes: int = 0
    board_watts: float = 0.0
    node_nm: float = 0.0
    walks_columns: bool = False
    clock_hz: float = 0.0
    node_devices: int = 8

    def peak_flops_per_s(self, precision: Precision) -> float:
        """Return the rate at a precision; float32's if the device does not support it."""
        return self.flops_per_s.get(precision, self.flops_per_s["float32"])


NODES_NM = {16: 11.3, 12: 11.3, 8: 8.4, 7: 7.0, 6: 6.5, 5: 5.2}
"""Feature sizes by density, as 7 nm x sqrt(66 / million transistors per mm^2), by a process's name.

GP104 and TU102 have 23 and 25 (16 and 12 nm, one process in all but name), GA102 45, GA100 66,
AD102 and GH100 126 and 98; transistors and areas by NVIDIA's white papers. 6 nm is scaled by TSMC's
word.
"""

PASCAL_NODE = 16
"""Devices in this process are of the generation before Volta."""


def _read_row(row: dict[str, Any], link_rates: Mapping[str, float]) -> Accelerator:
    process = row.pop("process_nm", None)
    return Accelerator(
        memory_bytes=round(row.pop("reported_gib", 0) * 2**30),
        link_bandwidth_bytes_per_s=link_rates[row["link"]],
        node_nm=NODES_NM.get(process, 0.0),
        walks_columns=process == PASCAL_NODE,
        **row,
    )


_TABLE = json.loads(
    files(__package__).joinpath("tables", "accelerators.json").read_text(encoding="utf-8")
)

CATALOGUE = tuple(_read_row(row, _TABLE["link_bytes_per_s"]) for row in _TABLE["devices"])
"""All devices with known figures."""


def get_accelerator(name: str) -> Accelerator:
    """Return the device of a name or alias, ignoring case; raise `InvalidInput` for others."""
    wanted = name.lower()
    for entry in CATALOGUE:
        if wanted == entry.name.lower() or wanted in entry.aliases:
            return entry
    names = [entry.name for entry in CATALOGUE]
    near = get_close_matches(name.upper(), names, n=1, cutoff=0.75)
    raise InvalidInput(
        f"unknown device {name!r}"
        + (f"; did you mean {near[0]}?" if near else ".")
        + f" The catalogue has {', '.join(names)}",
        field="/device",
    )


def default_precision(devices: Sequence[Accelerator]) -> Precision:
    """Return the first of bfloat16, float16 and float32 that every GPU has; float32 for a CPU."""
    if devices[0].backend == "cpu":
        return "float32"
    gpus = [entry for entry in devices if entry.backend != "cpu"]
    order: tuple[Precision, ...] = ("bfloat16", "float16")
    have_all = (name for name in order if all(name in entry.flops_per_s for entry in gpus))
    return next(have_all, "float32")


def explain_precision(devices: Sequence[Accelerator]) -> str:
    """Say which devices decide `default_precision`; nothing if all have the same by themselves."""
    decided = default_precision(devices)
    alone = {entry.name: default_precision([entry]) for entry in devices}
    deciders = " and ".join(name for name, own in alone.items() if own == decided)
    others = " and ".join(f"{name} in {own}" for name, own in alone.items() if own != decided)
    return others and (
        f"{deciders} decides the precision of all devices, {decided}; alone, {others} would be "
        "estimated: choose another with --precision (estimate.precision over HTTP)"
    )


def check_precision(device: Accelerator, precision: Precision) -> None:
    """Raise `InvalidInput` if a GPU does not support a precision; CPUs fall back to float32."""
    if device.backend != "cpu" and precision not in device.flops_per_s:
        raise InvalidInput(
            f"{device.full_name} does not support {precision}; it supports "
            f"{', '.join(device.flops_per_s)}; ask for one of these, or leave the device out",
            field="/precision",
        )


def find_by_driver_name(device_name: str) -> Accelerator | None:
    """Return the device that a driver reports as, e.g., ``NVIDIA A100-SXM4-80GB``."""
    text = device_name.lower()
    if " mig " in text:  # a slice of the card: its speed is not known
        return None
    return next((entry for entry in CATALOGUE if re.search(entry.pattern, text)), None)


def find_by_memory(memory_bytes: int) -> tuple[Accelerator, ...]:
    """Return the devices whose memory is within 10 % of this size, the nearest first.

    Of equally near ones those with bfloat16, which newer devices have, come first. A card counts as
    having its nominal memory too: 24e9 bytes are a card of 24 GB, whatever torch reports.
    """

    def distance(entry: Accelerator) -> float:
        sizes = (entry.memory_bytes, entry.memory_gb * 10**9)
        return min(abs(size - memory_bytes) for size in sizes)

    near = [e for e in CATALOGUE if e.memory_bytes and distance(e) <= 0.1 * memory_bytes]
    return tuple(sorted(near, key=lambda e: (distance(e), "bfloat16" not in e.flops_per_s)))


def find_card_bytes(memory_gb: float) -> int | None:
    """Return the memory of the usual card of a nominal size; `None` if no card has that size."""
    near = find_by_memory(int(memory_gb * 10**9))
    return next((entry.memory_bytes for entry in near if entry.memory_gb == memory_gb), None)
