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

    def peak_flops_per_s(self, precision: Precision) -> float:
        """Return the rate at a precision; float32's if the device does not support it."""
        return self.flops_per_s.get(precision, self.flops_per_s["float32"])


_LINK_GB_PER_S = {
    "NVLink 2": 150, "NVLink 3": 300, "NVLink 4": 450, "NVLink 5": 900,
    "PCIe 4.0 x16": 32, "PCIe 5.0 x16": 64, "Infinity Fabric": 64,
}  # fmt: skip


def _gpu(
    name: str,
    full_name: str,
    pattern: str,
    *,
    tera: tuple[float, float, float | None, float],
    memory_gb: int,
    gb_per_s: float,
    link: str,
    source: str,
    aliases: tuple[str, ...] = (),
    backend: Backend = "cuda",
) -> Accelerator:
    """Build an entry; ``tera`` is TFLOP/s of float32, tf32, bfloat16 (`None`: none) and float16."""
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
    )


A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet, June 2021"
H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet, March 2023; sparse rates halved"

CATALOGUE: tuple[Accelerator, ...] = (
    # tera: TFLOP/s of float32, tf32, bfloat16 (None: not supported) and float16
    _gpu(
        "A100-40GB", "NVIDIA A100 SXM 40 GB", r"a100.*40gb", tera=(19.5, 156, 312, 312),
        memory_gb=40, gb_per_s=1555, link="NVLink 3",
        source="NVIDIA A100 Tensor Core GPU data sheet, 2020",
    ),
    _gpu(
        "A100-80GB", "NVIDIA A100 SXM 80 GB", r"a100(?!.*(40gb|pcie))", tera=(19.5, 156, 312, 312),
        memory_gb=80, gb_per_s=2039, link="NVLink 3", source=A100_SHEET, aliases=("a100",),
    ),
    _gpu(
        "A100-PCIe", "NVIDIA A100 PCIe 80 GB", r"a100.*pcie", tera=(19.5, 156, 312, 312),
        memory_gb=80, gb_per_s=1935, link="PCIe 4.0 x16", source=A100_SHEET,
    ),
    _gpu(
        "H100", "NVIDIA H100 SXM", r"h100(?!.*(pcie|nvl))", tera=(67, 494.5, 989.5, 989.5),
        memory_gb=80, gb_per_s=3350, link="NVLink 4",
        source=H100_SHEET, aliases=("h100-sxm", "h100-80gb"),
    ),
    _gpu(
        "H100-PCIe", "NVIDIA H100 PCIe", r"h100.*pcie", tera=(51, 378, 756.5, 756.5),
        memory_gb=80, gb_per_s=2000, link="PCIe 5.0 x16", source=H100_SHEET,
    ),
    _gpu(
        "H200", "NVIDIA H200 SXM", r"h200", tera=(67, 494.5, 989.5, 989.5),
        memory_gb=141, gb_per_s=4800, link="NVLink 4",
        source="NVIDIA H200 Tensor Core GPU data sheet, November 2023; sparse rates halved",
    ),
    _gpu(
        "B200", "NVIDIA B200 (HGX, 1,000 W)", r"b200", tera=(80, 1100, 2250, 2250),
        memory_gb=180, gb_per_s=8000, link="NVLink 5",
        source="NVIDIA Blackwell Architecture Technical Brief, 2024, and HGX B200 data sheet",
    ),
    _gpu(
        "RTX4090", "NVIDIA GeForce RTX 4090", r"rtx 4090", tera=(82.6, 82.6, 165.2, 165.2),
        memory_gb=24, gb_per_s=1008, link="PCIe 4.0 x16",
        source="NVIDIA Ada GPU Architecture white paper 2.0, table 2, 2022; "
        "16-bit products summed in float32", aliases=("rtx-4090", "4090"),
    ),
    _gpu(
        "L4", "NVIDIA L4", r"l4$", tera=(30.3, 60, 121, 121),
        memory_gb=24, gb_per_s=300, link="PCIe 4.0 x16",
        source="NVIDIA L4 Tensor Core GPU data sheet, March 2023; sparse rates halved",
    ),
    _gpu(
        "L40S", "NVIDIA L40S", r"l40s", tera=(91.6, 183, 362.05, 362.05),
        memory_gb=48, gb_per_s=864, link="PCIe 4.0 x16",
        source="NVIDIA L40S data sheet, August 2023",
    ),
    _gpu(
        "V100", "NVIDIA V100 SXM2 16 GB", r"v100", tera=(15.7, 15.7, None, 125),
        memory_gb=16, gb_per_s=900, link="NVLink 2",
        source="NVIDIA V100 Tensor Core GPU data sheet, January 2020; "
        "no tf32 or bfloat16 products, 125 TFLOP/s in float16", aliases=("v100-16gb",),
    ),
    _gpu(
        "MI300X", "AMD Instinct MI300X", r"mi300x", tera=(163.4, 653.7, 1307.4, 1307.4),
        memory_gb=192, gb_per_s=5300, link="Infinity Fabric",
        source="AMD Instinct MI300X data sheet, December 2023", backend="rocm",
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
    """Return bfloat16 if every GPU supports it, else float16; float32 if the first is a CPU."""
    if devices[0].backend == "cpu":
        return "float32"
    gpus = [entry for entry in devices if entry.backend != "cpu"]
    return "bfloat16" if all("bfloat16" in entry.flops_per_s for entry in gpus) else "float16"


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
