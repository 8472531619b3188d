"""Seconds from FLOPs and bytes: the roofline model (Williams, Waterman and Patterson 2009).

On a CPU an operation takes the longer of its arithmetic and its traffic, and something for being
started::

    time = max(flops / (peak * e), bytes / (bandwidth * b)) + overhead

e is the share of the peak rate that products of its class reach, b the share of the memory's
bandwidth that its class reaches; products share one.

On a GPU `kernel_model` puts in the tiles of a product's shape. Kernels run one after the other
while the host starts the next ones, so that a list of operations takes the longer of both sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...core.cluster.accelerators import Accelerator, Precision
from .device_table import GpuTable, Launch, arithmetic, load_gpu_table
from .flops import OPERATION_CLASSES, Cost, OperationClass
from .kernel_model import (
    ChipFigures,
    KernelConstants,
    attention_seconds,
    product_seconds,
    traffic_seconds,
)

PRODUCTS: tuple[OperationClass, ...] = ("matmul", "attention", "convolution")
"""Classes whose efficiency is of the peak rate; the others' is of the bandwidth."""

DENSE: tuple[OperationClass, ...] = ("matmul", "convolution")
"""Classes that draw the most power, and lose clock when that lasts."""

Rate = OperationClass | Literal["traffic", "overhead"]
"""What calibration may change."""

RATES: tuple[Rate, ...] = (*OPERATION_CLASSES, "traffic", "overhead")


SMALL_CACHE_BYTES = 2 * 10**7
"""Below it, normalisations read their rows from memory twice."""


@dataclass(frozen=True)
class GpuKernels:
    """Needs of a GPU's kernels beyond its rates.

    Attributes:
        constants: Of its arithmetic.
        num_units: Its multiprocessors.
        clock_hz: Their boost clock.
        cache_bytes: Its last-level cache.
        walks_columns: See `ChipFigures`.
        attention_backward: Rate of attention's backward against its forward's.
        reduction_backward: Share of bandwidth of a reduction's backward, likewise.
        fused_traffic: Share of elementwise traffic left by compilation; 1 without.
        in_model: Factor on the times of `DENSE` kernels; 1 for one kernel again and again.
        attention_start_s: What attention takes beyond other kernels, however small.
    """

    constants: KernelConstants
    num_units: int
    clock_hz: float
    cache_bytes: int
    walks_columns: bool
    attention_backward: float
    reduction_backward: float
    fused_traffic: float = 1.0
    in_model: float = 1.0
    attention_start_s: float = 0.0


@dataclass(frozen=True)
class DeviceRates:
    """Efficiencies: the share of a device's peak rates that operations reach.

    Attributes:
        peak_flops_per_s: Of the device, at the precision used.
        bandwidth_bytes_per_s: Of its memory.
        efficiency: By class: of the peak for products, of the bandwidth for the others. May
            exceed 1 where the peak is that of a weaker device, or caches help.
        traffic: Share of the bandwidth that products reach.
        overhead_s: Per operation; on a GPU, of the host that starts it.
        gpu: What its kernels need beyond that; `None` for a CPU.
    """

    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    efficiency: dict[OperationClass, float]
    traffic: float
    overhead_s: float
    gpu: GpuKernels | None = None

    def scaled(self, name: Rate, factor: float) -> DeviceRates:
        """Return the rates with one of them multiplied."""
        if name == "overhead":
            return replace(self, overhead_s=self.overhead_s * factor)
        if name == "traffic":
            return replace(self, traffic=self.traffic * factor)
        changed = {**self.efficiency, name: self.efficiency[name] * factor}
        return replace(self, efficiency=changed)


CPU_EFFICIENCY: dict[OperationClass, float] = {
    "matmul": 0.8,
    "attention": 0.4,  # products of small tiles, with exponentials between them
    "convolution": 0.5,
    "elementwise": 0.7,
    "reduction": 0.5,
    "embedding": 0.4,
}
CPU_TRAFFIC = 0.7
CPU_OVERHEAD_S = 5e-6
"""PyTorch's dispatcher and autograd, per operation.

All figures of a CPU are guesses, as profiles say; how wrong they are was measured
(docs/evidence/estimates.md).
"""


def default_rates(
    device: Accelerator,
    precision: Precision,
    num_threads: int = 1,
    *,
    table: GpuTable | None = None,
    launch: Launch = "eager",
) -> DeviceRates:
    """Data-sheet rates and usual efficiencies; of a CPU, of that many cores."""
    if device.backend != "cpu":
        return _gpu_rates(device, precision, table or load_gpu_table(), launch)
    return DeviceRates(
        peak_flops_per_s=device.peak_flops_per_s(precision) * num_threads,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * num_threads,
        efficiency=dict(CPU_EFFICIENCY),
        traffic=CPU_TRAFFIC,
        overhead_s=CPU_OVERHEAD_S,
    )


def _gpu_rates(
    device: Accelerator, precision: Precision, table: GpuTable, launch: Launch
) -> DeviceRates:
    products = table.product_share(device, precision)[0]
    # The other classes' shares of bandwidth follow the device's own share for copies.
    memory = table.memory_share(device)[0] / table.memory.copy_share
    figures = table.memory
    kernels = table.kernels[arithmetic(precision)]
    reread = figures.reread if device.cache_bytes < SMALL_CACHE_BYTES else 1.0
    return DeviceRates(
        peak_flops_per_s=device.peak_flops_per_s(precision),
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        efficiency={
            "matmul": products,
            "attention": products * table.attention_forward * table.attention_factor(device),
            "convolution": products * table.convolution,
            "elementwise": memory * figures.copy_share,
            "reduction": memory * figures.reduction * reread,
            "embedding": memory * figures.embedding,
        },
        traffic=memory * figures.products,
        overhead_s=table.host_s[launch],
        gpu=GpuKernels(
            constants=kernels.constants(),
            num_units=device.num_units,
            clock_hz=device.clock_hz,
            cache_bytes=device.cache_bytes,
            walks_columns=device.walks_columns,
            attention_backward=table.attention_backward / table.attention_forward,
            reduction_backward=figures.backward,
            fused_traffic=1.0 if launch in ("eager", "kernel") else table.fused_traffic,
            attention_start_s=table.attention_start_s,
            in_model=1.0 if launch == "kernel" else kernels.in_model,
        ),
    )


class CostTable:
    """Lists of operations as arrays, so that many can be timed at many rates."""

    def __init__(self, lists: Sequence[Iterable[Cost]]) -> None:
        self.count = len(lists)
        owners: list[int] = []
        rows: list[tuple[float, ...]] = []
        for owner, costs in enumerate(lists):
            for cost, times in Counter(costs).items():
                owners.append(owner)
                kind = OPERATION_CLASSES.index(cost.kind)
                shape = cost.shape or (0, 0, 0, 0)
                rows.append((kind, cost.flops, cost.bytes, times, cost.is_backward, *shape))
        table = np.array(rows, dtype=np.float64).reshape(-1, 9)
        self._owner = np.array(owners, dtype=np.intp)
        self._kind = table[:, 0].astype(np.intp)
        self._flops, self._bytes, self._times = table[:, 1], table[:, 2], table[:, 3]
        self._is_backward = table[:, 4].astype(bool)
        self._shapes = table[:, 5:]

    def seconds(self, rates: DeviceRates) -> NDArray[np.float64]:
        """Return the time of each list of operations."""
        running = self._sum(self._running(rates))
        if rates.gpu is None:
            return running
        return np.maximum(running, self._sum(rates.overhead_s * self._times))

    def seconds_by_class(self, rates: DeviceRates) -> NDArray[np.float64]:
        """Return the time that each list's operations run, a column for each class.

        On a GPU they may sum to less than the list takes, which then waits for the host.
        """
        found = np.zeros((self.count, len(OPERATION_CLASSES)))
        np.add.at(found, (self._owner, self._kind), self._running(rates))
        return found

    def _running(self, rates: DeviceRates) -> NDArray[np.float64]:
        """Return the time that each row's operations run."""
        if rates.gpu is not None:
            return self._kernels(rates, rates.gpu) * self._times
        shares = rates.efficiency
        of_peak = np.array([shares[name] for name in OPERATION_CLASSES])
        of_bandwidth = np.array(
            [rates.traffic if name in PRODUCTS else shares[name] for name in OPERATION_CLASSES]
        )
        arithmetic = self._flops / (rates.peak_flops_per_s * of_peak[self._kind])
        traffic = self._bytes / (rates.bandwidth_bytes_per_s * of_bandwidth[self._kind])
        each: NDArray[np.float64] = np.maximum(arithmetic, traffic) + rates.overhead_s
        return each * self._times

    def _sum(self, each: NDArray[np.float64]) -> NDArray[np.float64]:
        totals = np.zeros(self.count)
        # Not `totals[owner] += ...`, which would add only the last of an owner's rows.
        np.add.at(totals, self._owner, each)
        return totals

    def _kernels(self, rates: DeviceRates, gpu: GpuKernels) -> NDArray[np.float64]:
        """Return the time of each row's kernel on a GPU."""
        each = np.zeros(len(self._kind))
        known = self._shapes.all(axis=1)
        for index, name in enumerate(OPERATION_CLASSES):
            chosen = self._kind == index
            if not chosen.any():
                continue
            if name not in PRODUCTS:
                each[chosen] = self._traffic(chosen, name, rates, gpu)
                continue
            share = rates.efficiency[name]
            shapeless = chosen & ~known
            each[shapeless] = np.maximum(
                self._flops[shapeless] / (rates.peak_flops_per_s * share),
                self._bytes[shapeless] / (rates.bandwidth_bytes_per_s * rates.traffic),
            )
            for backward in (False, True):
                rows = chosen & known & (self._is_backward == backward)
                chip = ChipFigures(
                    rate_flops_per_s=rates.peak_flops_per_s
                    * share
                    * (gpu.attention_backward if backward and name == "attention" else 1.0),
                    bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s * rates.traffic,
                    cache_bytes=gpu.cache_bytes,
                    num_units=gpu.num_units,
                    clock_hz=gpu.clock_hz,
                    walks_columns=gpu.walks_columns,
                )
                price = attention_seconds if name == "attention" else product_seconds
                each[rows] = price(
                    self._shapes[rows], self._flops[rows], self._bytes[rows], chip, gpu.constants
                )
        starts = np.where(
            self._kind == OPERATION_CLASSES.index("attention"), gpu.attention_start_s, 0.0
        )
        dense = np.isin(self._kind, [OPERATION_CLASSES.index(name) for name in DENSE])
        return np.where(dense, each * gpu.in_model, each) + gpu.constants.start_s + starts

    def _traffic(
        self, chosen: NDArray[np.bool_], name: OperationClass, rates: DeviceRates, gpu: GpuKernels
    ) -> NDArray[np.float64]:
        chip = ChipFigures(
            rate_flops_per_s=1.0,
            bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s * rates.efficiency[name],
            cache_bytes=gpu.cache_bytes,
            num_units=gpu.num_units,
            clock_hz=gpu.clock_hz,
        )
        moved = self._bytes[chosen]
        if name == "elementwise":
            moved = moved * gpu.fused_traffic
        time_s = traffic_seconds(moved, chip, gpu.constants.cache_unit_rate)
        slower = self._is_backward[chosen] & (name == "reduction")
        return np.where(slower, time_s / gpu.reduction_backward, time_s)
