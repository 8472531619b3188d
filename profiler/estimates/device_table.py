"""Efficiencies of GPUs: from a table where they were measured, else by a rule from other devices.

`tables/gpu.json` is written by ``benchmarks/truth.py --fit`` from public measurements, and says
for every device where its figures come from. The rules for devices that it lacks:

- Another device with the same chip lends its share of the peak, the nearest in watts before others.
- Otherwise large products sustain the smaller of two shares. One is `ceiling`, which in float32
  falls with the rate of a multiprocessor: with twice the lanes, the rest of it (operands, integers)
  did not double. The other is what the device's power allows: ``flops_per_joule`` at 7 nm, times
  (7 / node) ^ ``node_exponent``, times watts. Small cards (T4, L4) are bound by power, not by their
  data sheet's clock. AMD's share is a figure of its own.
- Copies reach `copy` of the data sheet's bandwidth.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Literal, Self

from pydantic import Field

from ...core.cluster.accelerators import CATALOGUE, Accelerator, Precision
from ...core.document import Record
from .kernel_model import KernelConstants

Arithmetic = Literal["simt", "tensor"]
"""Float32 on general cores, or 16 bits and tf32 on tensor cores."""

Basis = Literal["table", "rule", "guess"]
"""What a figure rests on: a measurement of the device, of others, or of none like it."""

Launch = Literal["eager", "compiled", "graph", "kernel"]
"""How kernels are started: one by one, by compiled code, as a CUDA graph, or one kernel again and
again, as benchmarks of kernels do."""

REFERENCE_NM = 7.0

REFERENCE_UNIT_FLOPS_PER_S = 2e11
"""Float32 rate of a multiprocessor with 64 lanes at some 1.5 GHz, at which a rule's `ceiling` is
stated."""


class ProductRule(Record):
    """Rates that products of one arithmetic sustain on a device that the table lacks."""

    ceiling: float = Field(gt=0, le=1)
    width_exponent: float | None = Field(None, ge=0)
    flops_per_joule: float = Field(gt=0)
    node_exponent: float
    rocm_share: float = Field(gt=0, le=1)

    def share(self, device: Accelerator, precision: Precision) -> float:
        """Return the share of a CUDA device's peak."""
        peak = device.peak_flops_per_s(precision)
        ceiling = self.ceiling
        if self.width_exponent is not None:
            width = peak / device.num_units / REFERENCE_UNIT_FLOPS_PER_S
            ceiling = min(1.0, ceiling / float(width**self.width_exponent))
        smaller = float((REFERENCE_NM / device.node_nm) ** self.node_exponent)
        per_joule = self.flops_per_joule * smaller
        # tf32 takes the energy of twice the 16-bit operations.
        if precision == "tf32":
            per_joule /= 2
        return min(ceiling, per_joule * device.board_watts / peak)


class KernelFigures(Record):
    """See `KernelConstants`."""

    k_start: float
    half_tile: float
    small_tile: float
    cache_unit_rate: float
    overlap: float
    start_s: float
    columns: float = 4096.0
    column_exponent: float = 0.0
    in_model: float = 1.0
    """Factor on a product's time inside a model against one kernel again and again: caches hold
    other kernels' data, and the clock has to last."""

    def constants(self) -> KernelConstants:
        return KernelConstants(**self.model_dump(exclude={"in_model"}))


class MemoryFigures(Record):
    """Shares of the data sheet's bandwidth.

    Attributes:
        copy_share: Of elementwise kernels.
        reduction: Of reductions whose second pass over a row hits the cache.
        reread: Factor on that if the last-level cache is small (below `SMALL_CACHE_BYTES`).
        backward: Factor on a reduction's backward.
        embedding: Of gathers and scatters.
        products: Of the operands of products.
    """

    copy_share: float
    reduction: float
    reread: float
    backward: float
    embedding: float
    products: float


class DeviceFigures(Record):
    """Measured shares of one device's data-sheet rates, where known.

    Attributes:
        published: Arithmetics whose share rests on single published products alone, most of them
            squares; profiles say of it that it follows from a rule.
        attention: Factor on the rate of fused attention against the table's for all devices: below
            1 where PyTorch's kernel was written for an earlier generation.
    """

    tensor: float | None = None
    simt: float | None = None
    memory: float | None = None
    attention: float | None = None
    published: tuple[Arithmetic, ...] = ()
    source: str


class GpuTable(Record):
    """Figures of GPUs, with their sources.

    Attributes:
        attention_forward: Rate of fused attention, as a share of what large products sustain.
        attention_backward: Its backward's, likewise.
        attention_start_s: What its kernels take however little they do, beyond others.
        convolution: Rate of convolutions, likewise.
        host_s: Time a process takes to start an operation, by launch.
        fused_traffic: Share of elementwise traffic that compiled code leaves.
        bands: Relative error that at least 90 % of left-out rows keep to, by class of model.
        kernel_bands: Relative error that at least 90 % of left-out rows keep to, by class of single
            kernel; a class that was not measured is left out.
    """

    date: str
    source: str
    products: dict[Arithmetic, ProductRule]
    kernels: dict[Arithmetic, KernelFigures]
    memory: MemoryFigures
    attention_forward: float
    attention_backward: float
    attention_start_s: float = 0.0
    convolution: float
    host_s: dict[Launch, float]
    fused_traffic: float
    devices: dict[str, DeviceFigures]
    bands: dict[str, float]
    kernel_bands: dict[Arithmetic, dict[str, float]]

    def product_share(self, device: Accelerator, precision: Precision) -> tuple[float, Basis]:
        """Return the share of the peak that large products sustain, and what that rests on."""
        kind = arithmetic(precision)
        found = self.devices.get(device.name)
        share = None if found is None else getattr(found, kind)
        if found is not None and share is not None:
            return share, "rule" if kind in found.published else "table"
        shares = {name: getattr(entry, kind) for name, entry in self.devices.items()}
        for other in list_same_chip(device):
            if (lent := shares.get(other.name)) is not None:
                return lent, "rule"
        rule = self.products[kind]
        if device.backend == "rocm":
            return rule.rocm_share, "rule"
        return rule.share(device, precision), "rule"

    def memory_share(self, device: Accelerator) -> tuple[float, Basis]:
        """Return the share of the data sheet's bandwidth that copies reach."""
        found = self.devices.get(device.name)
        if found is not None and found.memory is not None:
            return found.memory, "table"
        return self.memory.copy_share, "rule"

    def attention_factor(self, device: Accelerator) -> float:
        """Return the rate of fused attention on a device against the table's for all."""
        found = self.devices.get(device.name)
        return 1.0 if found is None or found.attention is None else found.attention

    def without(self, name: str) -> Self:
        """Return the table without a device's own figures."""
        kept = {key: entry for key, entry in self.devices.items() if key != name}
        return self.model_copy(update={"devices": kept})


def list_same_chip(device: Accelerator) -> tuple[Accelerator, ...]:
    """Return the other devices with a device's chip, the nearest in watts first.

    Chips are taken to be the same with as many multiprocessors in the same process: parts of a chip
    that are sold with fewer are others.
    """
    chip = (device.backend, device.num_units, device.node_nm)
    others = (
        entry
        for entry in CATALOGUE
        if (entry.backend, entry.num_units, entry.node_nm) == chip and entry.name != device.name
    )
    return tuple(sorted(others, key=lambda other: abs(other.board_watts - device.board_watts)))


def arithmetic(precision: Precision) -> Arithmetic:
    return "simt" if precision == "float32" else "tensor"


@cache
def load_gpu_table() -> GpuTable:
    """Read the table that is part of the package."""
    text = files(__package__).joinpath("tables", "gpu.json").read_text(encoding="utf-8")
    return GpuTable.model_validate(json.loads(text))
