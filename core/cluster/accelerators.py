"""Peak rates of accelerators from their makers' data sheets, without torch.

Rates are for dense matrices: sparse rates on a data sheet are twice as high. Link bandwidths are
for one direction, where data sheets usually state both together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

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
        memory_bytes: Its memory; 0 for a CPU, which uses the machine's.
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
    """

    name: str
    full_name: str
    backend: Backend
    pattern: str
    aliases: tuple[str, ...] = ()
    flops_per_s: dict[Precision, float]
    memory_bytes: int
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

_LINK_GB_PER_S = {
    "NVLink 2": 150, "NVLink 3": 300, "NVLink 4": 450, "NVLink 5": 900,
    "PCIe 3.0 x16": 16, "PCIe 4.0 x16": 32, "PCIe 5.0 x16": 64,
    "Infinity Fabric 3": 50, "Infinity Fabric 4": 64,
    "PCIe 4.0 x16 without peer-to-peer": 32, "PCIe 5.0 x16 without peer-to-peer": 64,
}  # fmt: skip
"""GB/s of one direction; GeForce cards of these generations copy through the host's memory.

NVLink joins a device to a switch by 6, 12, 18 and 18 links of 25 GB/s, in its fifth generation of
50. For Infinity Fabric it is the rate of one link between two devices, by AMD's documentation of
MI250 and MI300X; MI100's is assumed to be MI250's."""


def _gpu(
    name: str,
    full_name: str,
    pattern: str,
    *,
    tera: tuple[float, float | None, float | None, float | None],
    memory_gb: int,
    gb_per_s: float,
    link: str,
    source: str,
    chip: tuple[int, float, float, int, float],
    aliases: tuple[str, ...] = (),
    backend: Backend = "cuda",
) -> Accelerator:
    """Build an entry.

    ``tera`` is TFLOP/s of float32, tf32, bfloat16 (`None`: none) and float16; ``chip`` is the
    number of multiprocessors, megabytes of last-level cache, watts, a key of `NODES_NM` and the
    boost clock in GHz (where none is stated, the peak rate by what a multiprocessor does in a
    cycle).
    """
    precisions: tuple[Precision, ...] = ("float32", "tf32", "bfloat16", "float16")
    rates = zip(precisions, tera, strict=True)
    return Accelerator(
        name=name,
        full_name=full_name,
        backend=backend,
        pattern=pattern,
        aliases=aliases,
        flops_per_s={precision: rate * 1e12 for precision, rate in rates if rate is not None},
        memory_bytes=memory_gb * 10**9,
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        link=link,
        link_bandwidth_bytes_per_s=_LINK_GB_PER_S[link] * 1e9,
        source=source,
        num_units=chip[0],
        cache_bytes=int(chip[1] * 10**6),
        board_watts=chip[2],
        node_nm=NODES_NM[chip[3]],
        walks_columns=chip[3] == PASCAL_NODE,
        clock_hz=chip[4] * 1e9,
    )


A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet, June 2021"
H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet, March 2023; sparse rates halved"

CATALOGUE: tuple[Accelerator, ...] = (
    # tera: TFLOP/s of float32, tf32, bfloat16 (None: not supported) and float16
    _gpu(
        "A100-40GB", "NVIDIA A100 SXM 40 GB", r"a100(?!.*pcie).*40gb", tera=(19.5, 156, 312, 312),
        chip=(108, 40, 400, 7, 1.41), memory_gb=40, gb_per_s=1555, link="NVLink 3",
        source="NVIDIA A100 Tensor Core GPU data sheet, 2020",
    ),
    _gpu(
        "A100-80GB", "NVIDIA A100 SXM 80 GB", r"a100(?!.*(40gb|pcie))", tera=(19.5, 156, 312, 312),
        chip=(108, 40, 400, 7, 1.41), memory_gb=80, gb_per_s=2039,
        link="NVLink 3", source=A100_SHEET, aliases=("a100",),
    ),
    _gpu(
        "A100-PCIe", "NVIDIA A100 PCIe 80 GB", r"a100(?!.*40gb).*pcie", tera=(19.5, 156, 312, 312),
        chip=(108, 40, 300, 7, 1.41), memory_gb=80, gb_per_s=1935, link="PCIe 4.0 x16",
        source=A100_SHEET,
    ),
    _gpu(
        "H100", "NVIDIA H100 SXM", r"h100(?!.*(pcie|nvl))", tera=(67, 494.5, 989.5, 989.5),
        chip=(132, 50, 700, 5, 1.83), memory_gb=80, gb_per_s=3350, link="NVLink 4",
        source=H100_SHEET, aliases=("h100-sxm", "h100-80gb"),
    ),
    _gpu(
        "H100-PCIe", "NVIDIA H100 PCIe", r"h100.*pcie", tera=(51, 378, 756.5, 756.5),
        chip=(114, 50, 350, 5, 1.62), memory_gb=80, gb_per_s=2000, link="PCIe 5.0 x16",
        source=H100_SHEET,
    ),
    _gpu(
        "H200", "NVIDIA H200 SXM", r"(?<!g)h200(?!.*nvl)", tera=(67, 494.5, 989.5, 989.5),
        chip=(132, 50, 700, 5, 1.83), memory_gb=141, gb_per_s=4800, link="NVLink 4",
        source="NVIDIA H200 Tensor Core GPU data sheet, November 2023; sparse rates halved",
    ),
    _gpu(
        "B200", "NVIDIA B200 (HGX, 1,000 W)", r"(?<!g)b200", tera=(80, 1100, 2250, 2250),
        chip=(148, 126, 1000, 5, 1.86), memory_gb=180, gb_per_s=8000, link="NVLink 5",
        source="NVIDIA Blackwell Architecture Technical Brief, 2024, and HGX B200 data sheet",
    ),
    _gpu(
        "RTX4090", "NVIDIA GeForce RTX 4090", r"rtx 4090$", tera=(82.6, 82.6, 165.2, 165.2),
        chip=(128, 72, 450, 5, 2.52), memory_gb=24, gb_per_s=1008,
        link="PCIe 4.0 x16 without peer-to-peer",
        source="NVIDIA Ada GPU Architecture white paper 2.0, table 2, 2022; "
        "16-bit products summed in float32", aliases=("rtx-4090", "4090"),
    ),
    _gpu(
        "L4", "NVIDIA L4", r"l4$", tera=(30.3, 60, 121, 121),
        chip=(58, 48, 72, 5, 2.04), memory_gb=24, gb_per_s=300, link="PCIe 4.0 x16",
        source="NVIDIA L4 Tensor Core GPU data sheet, March 2023; sparse rates halved",
    ),
    _gpu(
        "L40S", "NVIDIA L40S", r"l40s", tera=(91.6, 183, 362.05, 362.05),
        chip=(142, 96, 350, 5, 2.52), memory_gb=48, gb_per_s=864, link="PCIe 4.0 x16",
        source="NVIDIA L40S data sheet, August 2023",
    ),
    _gpu(
        "V100", "NVIDIA V100 SXM2 16 GB", r"v100(?!.*(pcie|fhhl))", tera=(15.7, None, None, 125),
        chip=(80, 6, 300, 12, 1.53), memory_gb=16, gb_per_s=900, link="NVLink 2",
        source="NVIDIA V100 Tensor Core GPU data sheet, January 2020; "
        "no tf32 or bfloat16 products, 125 TFLOP/s in float16", aliases=("v100-16gb",),
    ),
    _gpu(
        "MI300X", "AMD Instinct MI300X", r"mi300x", tera=(163.4, 653.7, 1307.4, 1307.4),
        chip=(304, 256, 750, 5, 2.1), memory_gb=192, gb_per_s=5300, link="Infinity Fabric 4",
        source="AMD Instinct MI300X data sheet, December 2023", backend="rocm",
    ),
    _gpu(
        "A100-PCIe-40GB", "NVIDIA A100 PCIe 40 GB", r"a100-pcie-40gb",
        tera=(19.5, 156, 312, 312), chip=(108, 40, 250, 7, 1.41),
        memory_gb=40, gb_per_s=1555, link="PCIe 4.0 x16",
        source="NVIDIA A100 PCIe 40 GB product brief, 2020",
    ),
    _gpu(
        "V100-PCIe", "NVIDIA V100 PCIe", r"v100-pcie", tera=(14, None, None, 112),
        chip=(80, 6, 250, 12, 1.37), memory_gb=32, gb_per_s=900, link="PCIe 3.0 x16",
        source="NVIDIA V100 Tensor Core GPU data sheet, January 2020",
    ),
    _gpu(
        "P100", "NVIDIA P100 PCIe 16 GB", r"p100(?!.*sxm)", tera=(9.3, None, None, 18.7),
        chip=(56, 4, 250, 16, 1.3), memory_gb=16, gb_per_s=732, link="PCIe 3.0 x16",
        source="NVIDIA Tesla P100 data sheet, 2016",
    ),
    _gpu(
        "P4", "NVIDIA P4", r"tesla p4$", tera=(5.5, None, None, None), chip=(20, 2, 75, 16, 1.07),
        memory_gb=8, gb_per_s=192, link="PCIe 3.0 x16",
        source="NVIDIA Tesla P4 data sheet, 2016",
    ),
    _gpu(
        "T4", "NVIDIA T4", r"\bt4$", tera=(8.1, None, None, 65), chip=(40, 4, 70, 12, 1.59),
        memory_gb=16, gb_per_s=320, link="PCIe 3.0 x16",
        source="NVIDIA T4 Tensor Core GPU data sheet, 2019",
    ),
    _gpu(
        "A10G", "NVIDIA A10G", r"a10g", tera=(35, 35, 70, 70), chip=(80, 6, 300, 8, 1.71), 
        memory_gb=24, gb_per_s=600, link="PCIe 4.0 x16",
        source="NVIDIA A10G data sheet for AWS, February 2022; sparse rates halved",
    ),
    _gpu(
        "A6000", "NVIDIA RTX A6000", r"rtx a6000", tera=(38.7, 77.4, 154.8, 154.8),
        chip=(84, 6, 300, 8, 1.8), memory_gb=48, gb_per_s=768, link="PCIe 4.0 x16",
        source="NVIDIA RTX A6000 data sheet, 2020; sparse rates halved",
        aliases=("rtx-a6000", "rtxa6000"),
    ),
    _gpu(
        "RTX3060", "NVIDIA GeForce RTX 3060", r"rtx 3060$", tera=(12.7, 12.7, 25.4, 25.4),
        chip=(28, 3, 170, 8, 1.78), memory_gb=12, gb_per_s=360,
        link="PCIe 4.0 x16 without peer-to-peer",
        source="NVIDIA Ampere GA102 GPU Architecture white paper, 2021: rates per multiprocessor "
        "at the card's boost clock", aliases=("rtx-3060", "3060"),
    ),
    _gpu(
        "RTX3090", "NVIDIA GeForce RTX 3090", r"rtx 3090$", tera=(35.6, 35.6, 71, 71),
        chip=(82, 6, 350, 8, 1.7), memory_gb=24, gb_per_s=936,
        link="PCIe 4.0 x16 without peer-to-peer",
        source="NVIDIA Ampere GA102 GPU Architecture white paper, table 2, 2021; 16-bit products "
        "summed in float32", aliases=("rtx-3090", "3090"),
    ),
    _gpu(
        "RTX5090", "NVIDIA GeForce RTX 5090", r"rtx 5090$", tera=(104.8, 104.8, 209.5, 209.5),
        chip=(170, 96, 575, 5, 2.41), memory_gb=32, gb_per_s=1792,
        link="PCIe 5.0 x16 without peer-to-peer",
        source="NVIDIA RTX Blackwell GPU Architecture white paper, 2025; 16-bit products summed "
        "in float32", aliases=("rtx-5090", "5090"),
    ),
    _gpu(
        "GB200", "NVIDIA GB200 (one of two GPUs)", r"gb200", tera=(80, 1250, 2500, 2500),
        chip=(148, 126, 1200, 5, 2.06), memory_gb=186, gb_per_s=8000, link="NVLink 5",
        source="NVIDIA GB200 NVL72 data sheet, 2024; sparse rates halved, one of 72 GPUs",
    ),
    _gpu(
        "MI100", "AMD Instinct MI100", r"mi100", tera=(46.1, None, 92.3, 184.6),
        chip=(120, 8, 300, 7, 1.5), memory_gb=32, gb_per_s=1229, link="Infinity Fabric 3",
        source="AMD Instinct MI100 data sheet, 2020; float32 by matrix cores", backend="rocm",
    ),
    _gpu(
        "MI210", "AMD Instinct MI210", r"mi210", tera=(45.3, None, 181, 181),
        chip=(104, 8, 300, 6, 1.7), memory_gb=64, gb_per_s=1638, link="Infinity Fabric 3",
        source="AMD Instinct MI210 data sheet, 2022; float32 by matrix cores", backend="rocm",
    ),
    _gpu(
        "MI250", "AMD Instinct MI250 (one of two dies)", r"mi250(?!x)",
        tera=(45.3, None, 181, 181), chip=(104, 8, 280, 6, 1.7), memory_gb=64, gb_per_s=1638,
        link="Infinity Fabric 3", backend="rocm",
        source="AMD Instinct MI250 data sheet, 2021, halved: a die is a device of its own",
    ),
    _gpu(
        "MI250X", "AMD Instinct MI250X (one of two dies)", r"mi250x",
        tera=(47.9, None, 191.5, 191.5), chip=(110, 8, 280, 6, 1.7), memory_gb=64, gb_per_s=1638,
        link="Infinity Fabric 3", backend="rocm",
        source="AMD Instinct MI250X data sheet, 2021, halved: a die is a device of its own",
    ),
    Accelerator(
        name="CPU",
        full_name="one CPU core with AVX2",
        backend="cpu",
        pattern=r"$^",  # matches nothing: a profile's device type identifies CPUs, not their name
        aliases=("cpu",),
        flops_per_s={"float32": 80e9},
        memory_bytes=0,
        bandwidth_bytes_per_s=12.8e9,
        link="memory",
        link_bandwidth_bytes_per_s=6.4e9,
        source="two 256-bit fused multiply-adds a cycle (Intel 64 and IA-32 Architectures "
        "Optimization Reference Manual) at an assumed 2.5 GHz; half a channel of DDR4-3200 "
        "(JEDEC JESD79-4) a core",
    ),
)  # fmt: skip
"""All devices with known figures."""


def get_accelerator(name: str) -> Accelerator:
    """Return the device of a name or alias, ignoring case; raise `InvalidInput` for others."""
    wanted = name.lower()
    for entry in CATALOGUE:
        if wanted == entry.name.lower() or wanted in entry.aliases:
            return entry
    names = [entry.name for entry in CATALOGUE]
    near = get_close_matches(name.upper(), names, n=1)
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


def check_precision(device: Accelerator, precision: Precision) -> None:
    """Raise `InvalidInput` if a GPU does not support a precision; CPUs fall back to float32."""
    if device.backend != "cpu" and precision not in device.flops_per_s:
        raise InvalidInput(
            f"{device.full_name} does not support {precision}; it supports "
            f"{', '.join(device.flops_per_s)}",
            field="/precision",
        )


def find_by_driver_name(device_name: str) -> Accelerator | None:
    """Return the device that a driver reports as, e.g., ``NVIDIA A100-SXM4-80GB``."""
    text = device_name.lower()
    if " mig " in text:  # a slice of the card: its speed is not known
        return None
    return next((entry for entry in CATALOGUE if re.search(entry.pattern, text)), None)


def find_by_memory(memory_bytes: int) -> tuple[Accelerator, ...]:
    """Return the devices whose memory is within 10 % of this size, the nearest first."""

    def distance(entry: Accelerator) -> int:
        return abs(entry.memory_bytes - memory_bytes)

    near = [e for e in CATALOGUE if e.memory_bytes and distance(e) <= 0.1 * memory_bytes]
    return tuple(sorted(near, key=distance))
