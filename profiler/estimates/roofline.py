"""Seconds from FLOPs and bytes: the roofline model (Williams, Waterman and Patterson 2009).

An operation takes the longer of its arithmetic and its traffic, and something for being started::

    time = max(flops / (peak * e), bytes / (bandwidth * b)) + overhead

e is the share of the peak rate that products of its class reach, b the share of the memory's
bandwidth that its class reaches; products share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...core.cluster.accelerators import Accelerator, Precision
from .flops import OPERATION_CLASSES, Cost, OperationClass

PRODUCTS: tuple[OperationClass, ...] = ("matmul", "attention", "convolution")
"""Classes whose efficiency is of the peak rate; the others' is of the bandwidth."""


Rate = OperationClass | Literal["traffic", "overhead"]
"""What calibration may change."""

RATES: tuple[Rate, ...] = (*OPERATION_CLASSES, "traffic", "overhead")


@dataclass(frozen=True)
class DeviceRates:
    """Efficiencies: the share of a device's peak rates that operations reach.

    Attributes:
        peak_flops_per_s: Of the device, at the precision used.
        bandwidth_bytes_per_s: Of its memory.
        efficiency: By class: of the peak for products, of the bandwidth for the others. May
            exceed 1 where the peak is that of a weaker device, or caches help.
        traffic: Share of the bandwidth that products reach.
        overhead_s: Per operation.
    """

    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    efficiency: dict[OperationClass, float]
    traffic: float
    overhead_s: float

    def scaled(self, name: Rate, factor: float) -> DeviceRates:
        """Return the rates with one of them multiplied."""
        if name == "overhead":
            return replace(self, overhead_s=self.overhead_s * factor)
        if name == "traffic":
            return replace(self, traffic=self.traffic * factor)
        changed = {**self.efficiency, name: self.efficiency[name] * factor}
        return replace(self, efficiency=changed)


GPU_EFFICIENCY: dict[OperationClass, float] = {
    "matmul": 0.7,  # large bf16 products alone reach 0.8 on an H200; a layer's are smaller
    "attention": 0.4,  # FlashAttention-2: 0.5 to 0.73 of an A100 (Dao 2023), 0.35 of an H100
    # (Shah et al. 2024)
    "convolution": 0.5,  # between products and the small filters that reuse little
    "elementwise": 0.75,  # copies reach 0.8 to 0.9 of data-sheet bandwidth; small tensors less
    "reduction": 0.6,  # read twice by most kernels
    "embedding": 0.4,  # rows in no order
}
CPU_EFFICIENCY: dict[OperationClass, float] = {
    "matmul": 0.8,
    "attention": 0.4,  # products of small tiles, with exponentials between them
    "convolution": 0.5,
    "elementwise": 0.7,
    "reduction": 0.5,
    "embedding": 0.4,
}
GPU_TRAFFIC = 0.75  # as copies
CPU_TRAFFIC = 0.7
GPU_OVERHEAD_S = 5e-6  # from one kernel's start to the next, issued by eager PyTorch
CPU_OVERHEAD_S = 5e-6  # PyTorch's dispatcher and autograd, per operation


def default_rates(device: Accelerator, precision: Precision, num_threads: int = 1) -> DeviceRates:
    """Data-sheet rates and usual efficiencies; of a CPU, of that many cores."""
    is_cpu = device.backend == "cpu"
    cores = num_threads if is_cpu else 1
    return DeviceRates(
        peak_flops_per_s=device.peak_flops_per_s(precision) * cores,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * cores,
        efficiency=dict(CPU_EFFICIENCY if is_cpu else GPU_EFFICIENCY),
        traffic=CPU_TRAFFIC if is_cpu else GPU_TRAFFIC,
        overhead_s=CPU_OVERHEAD_S if is_cpu else GPU_OVERHEAD_S,
    )


class CostTable:
    """Lists of operations as arrays, so that many can be timed at many rates."""

    def __init__(self, lists: Sequence[Iterable[Cost]]) -> None:
        self.count = len(lists)
        owners: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for owner, costs in enumerate(lists):
            for cost, times in Counter(costs).items():
                owners.append(owner)
                kind = OPERATION_CLASSES.index(cost.kind)
                rows.append((kind, cost.flops, cost.bytes, times))
        table = np.array(rows, dtype=np.float64).reshape(-1, 4)
        self._owner = np.array(owners, dtype=np.intp)
        self._kind = table[:, 0].astype(np.intp)
        self._flops, self._bytes, self._times = table[:, 1], table[:, 2], table[:, 3]

    def seconds(self, rates: DeviceRates) -> NDArray[np.float64]:
        """Return the time of each list of operations."""
        shares = rates.efficiency
        of_peak = np.array([shares[name] for name in OPERATION_CLASSES])
        of_bandwidth = np.array(
            [rates.traffic if name in PRODUCTS else shares[name] for name in OPERATION_CLASSES]
        )
        arithmetic = self._flops / (rates.peak_flops_per_s * of_peak[self._kind])
        traffic = self._bytes / (rates.bandwidth_bytes_per_s * of_bandwidth[self._kind])
        each = np.maximum(arithmetic, traffic) + rates.overhead_s
        totals = np.zeros(self.count)
        # Not `totals[owner] += ...`, which would add only the last of an owner's rows.
        np.add.at(totals, self._owner, each * self._times)
        return totals
