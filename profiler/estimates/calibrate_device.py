"""Time single operations on the device at hand and fit its table to them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import InvalidInput
from ..machine.clock import Clock
from .calibration import CalibrationPoint, calibrate
from .calibration_table import CalibrationTable, TimedOperation
from .estimate import DTYPES
from .flops import OPERATION_CLASSES, Cost
from .layer_costs import CostRecorder, EstimateTarget
from .roofline import CostTable, default_rates

LEAST_S, SAMPLES = 0.02, 3
"""A sample repeats an operation for at least so long; the middle of the samples counts."""

Operation = tuple[str, Callable[[], Any]]


def calibrate_device(
    wanted: EstimateTarget,
    device: torch.device,
    device_name: str,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CalibrationTable:
    """Return the table of a device, from products, attention, convolutions and traffic on it.

    Sizes are chosen by the device's own speed, so that a core and a large GPU both take minutes.

    Raises:
        InvalidInput: The device refuses every operation at that precision.
    """
    lists: list[tuple[Cost, ...]] = []
    timed: list[tuple[str, float]] = []
    refused = ""
    for name, run in _operations(wanted, device):
        try:
            recorder = CostRecorder(wanted.winograd)
            with recorder:
                run()
            time_s = time_operation(run, device)
        except RuntimeError as error:
            refused = f"{name}: {error}".splitlines()[0]
            on_progress(f"left out: {refused}")
            continue
        lists.append(tuple(recorder.costs))
        timed.append((name, time_s))
        on_progress(f"{name}: {time_s * 1e6:.0f} us")
    if not timed:
        raise InvalidInput(
            f"no operation runs at {wanted.precision} on {device_name} ({refused}); choose "
            "another --precision",
            field="/precision",
        )
    start = default_rates(wanted.device, wanted.precision, wanted.num_threads)
    # One point an operation: each counts alike, not by its share of the time of all.
    points = [
        CalibrationPoint([costs], [time_s]) for costs, (_, time_s) in zip(lists, timed, strict=True)
    ]
    rates = calibrate(start, points)
    costs = CostTable(lists)
    kinds = costs.seconds_by_class(rates).argmax(axis=1)
    return CalibrationTable(
        device=wanted.device.name,
        device_name=device_name,
        precision=wanted.precision,
        num_threads=wanted.num_threads,
        torch_version=torch.__version__,
        measured_on=datetime.now(tz=UTC).date(),
        efficiency={kind: float(share) for kind, share in rates.efficiency.items()},
        traffic=float(rates.traffic),
        overhead_s=float(rates.overhead_s),
        operations=tuple(
            TimedOperation(
                name=name, kind=OPERATION_CLASSES[kind], measured_s=time_s, fitted_s=float(found)
            )
            for (name, time_s), kind, found in zip(timed, kinds, costs.seconds(rates), strict=True)
        ),
    )


def time_operation(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of one call among many behind each other."""
    clock = Clock(device)

    def repeated(times: int) -> float:
        clock.settle()
        start = clock.mark()
        for _ in range(times):
            run()
        return clock.seconds(start, clock.mark())

    run()
    alone_s = max(repeated(1), 1e-7)
    times = max(1, min(1000, int(LEAST_S / alone_s)))
    return statistics.median(repeated(times) / times for _ in range(SAMPLES))


def _operations(wanted: EstimateTarget, device: torch.device) -> Iterator[Operation]:
    dtype = DTYPES[wanted.precision]
    # A GPU's kernels need some 1e11 FLOPs to fill it, a core 1e9.
    is_cpu = wanted.device.backend == "cpu"
    yield from _products(dtype, device, (64, 256, 1024) if is_cpu else (128, 1024, 4096, 16384))
    yield from _attention(dtype, device, (128, 512) if is_cpu else (512, 1024, 4096))
    yield from _convolutions(dtype, device, 2 if is_cpu else 32)
    yield from _traffic(dtype, device, (64, 1024) if is_cpu else (512, 4096, 32768))


def _products(
    dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]
) -> Iterator[Operation]:
    wide = sizes[min(2, len(sizes) - 1)]
    for rows in sizes:
        for inner, columns in ((wide // 4, wide // 4), (wide // 4, wide), (wide, wide)):
            left = torch.randn(rows, inner, device=device, dtype=dtype)
            right = torch.randn(inner, columns, device=device, dtype=dtype)
            yield f"product {rows} x {columns} x {inner}", lambda a=left, b=right: a @ b  # type: ignore[misc]


def _attention(
    dtype: torch.dtype, device: torch.device, lengths: tuple[int, ...]
) -> Iterator[Operation]:
    for length in lengths:
        batch = max(1, lengths[-1] // length)
        query, key, value = (
            torch.randn(batch, 8, length, 64, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )

        def forward(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        gradient = torch.ones_like(query)

        def both(run: Callable[[], Tensor] = forward, given: Tensor = gradient) -> None:
            run().backward(given)

        yield f"attention {batch} x 8 x {length} x 64", forward
        yield f"attention and its backward {batch} x 8 x {length} x 64", both


def _convolutions(dtype: torch.dtype, device: torch.device, batch: int) -> Iterator[Operation]:
    for channels, side, out, size in ((64, 56, 64, 3), (256, 14, 256, 3), (256, 56, 64, 1)):
        images = torch.randn(batch, channels, side, side, device=device, dtype=dtype)
        weights = torch.randn(out, channels, size, size, device=device, dtype=dtype)
        yield (
            f"convolution {batch} x {channels} x {side} x {side}, {size} x {size}",
            lambda x=images, w=weights, p=size // 2: functional.conv2d(x, w, padding=p),  # type: ignore[misc]
        )


def _traffic(
    dtype: torch.dtype, device: torch.device, rows_of: tuple[int, ...]
) -> Iterator[Operation]:
    tiny = torch.zeros(1, device=device)
    yield "next to nothing", lambda: tiny.add_(1)
    for rows in rows_of:
        x = torch.randn(rows, 4096, device=device, dtype=dtype)
        picks = torch.randint(0, rows, (rows,), device=device)
        cases: tuple[tuple[str, Callable[[Tensor], Any]], ...] = (
            ("add", lambda x: x + x.flip(0)[:1]),
            ("gelu", functional.gelu),
            ("layer norm", lambda x: functional.layer_norm(x, x.shape[-1:])),
            ("softmax", lambda x: torch.softmax(x, -1)),
            ("sum", lambda x: x.sum(-1)),
            ("embedding", partial(functional.embedding, picks)),
        )
        for name, call in cases:
            yield f"{name} {rows} x 4096", lambda call=call, x=x: call(x)  # type: ignore[misc]
