"""Times of single operations by shape, and the efficiencies that the estimator would need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_check.program import Failed, Given, Result, run_program
from stagewright.core.cluster.accelerators import Precision, find_by_driver_name
from stagewright.profiler.estimates.calibrate_device import time_operation


@dataclass(frozen=True)
class Operation:
    """One operation: its class in the estimator, FLOPs of products, and bytes it has to move."""

    kind: str
    what: str
    dtype: torch.dtype
    flops: int
    size_bytes: int
    run: Callable[[], Any]


def device_table(given: Given) -> Result:
    """Time every operation; one that the device refuses is named and ends no other."""
    device = torch.device(given.device)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    for make in (products, attentions, convolutions, traffic):
        try:
            for operation in make(device, small=given.small):
                try:
                    rows.append(measure(operation, device))
                except RuntimeError as error:
                    refused.append(f"{operation.what}: {error}".splitlines()[0])
        except RuntimeError as error:  # no memory for the operands of the rest
            refused.append(f"{make.__name__}: {error}".splitlines()[0])
    result: Result = {
        "rows": rows,
        "refused": refused,
        "overhead_s": overhead(device),
        "copies": copies(device, small=given.small),
        "efficiency": efficiencies(rows, given.device),
    }
    if refused or not rows:
        raise Failed(f"not measured: {'; '.join(refused)}", result)
    return result


def measure(operation: Operation, device: torch.device) -> dict[str, Any]:
    """Return the operation's time and the rates it reached."""
    time_s = time_operation(operation.run, device)
    return {
        "kind": operation.kind,
        "what": operation.what,
        "dtype": str(operation.dtype).removeprefix("torch."),
        "time_s": time_s,
        "flops_per_s": operation.flops / time_s,
        "bytes_per_s": operation.size_bytes / time_s,
    }


def products(device: torch.device, *, small: bool) -> Iterator[Operation]:
    """Matrix products of the shapes of transformers' layers, square ones and thin ones."""
    shapes = (
        [(64, 64, 64), (128, 64, 256)]
        if small
        else [
            (rows, inner, columns)
            for rows in (128, 1024, 4096, 16384)
            for inner, columns in ((1024, 1024), (1024, 4096), (4096, 4096), (4096, 16384))
        ]
    )
    for dtype in (torch.bfloat16, torch.float32):
        for rows, inner, columns in shapes:
            left = torch.randn(rows, inner, device=device, dtype=dtype)
            right = torch.randn(inner, columns, device=device, dtype=dtype)
            size = (rows * inner + inner * columns + rows * columns) * left.element_size()
            yield Operation(
                "matmul", f"{rows}x{inner} by {inner}x{columns}", dtype,
                2 * rows * inner * columns, size, lambda a=left, b=right: a @ b,
            )  # fmt: skip


def attentions(device: torch.device, *, small: bool) -> Iterator[Operation]:
    """Attention, causal and not, by length."""
    heads, size = (2, 16) if small else (16, 64)
    for tokens in (32, 64) if small else (512, 1024, 2048, 4096):
        batch = 1 if small else 16384 // tokens
        shape = (batch, heads, tokens, size)
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
        for causal in (False, True):

            def attend(inputs: list[Tensor] = inputs, causal: bool = causal) -> Tensor:
                return functional.scaled_dot_product_attention(*inputs, is_causal=causal)

            # Half of the products are masked away if causal, and not computed.
            flops = 4 * batch * heads * tokens**2 * size // (2 if causal else 1)
            what = f"{batch}x{heads}x{tokens}x{size}{' causal' if causal else ''}"
            moved = 4 * inputs[0].numel() * 2
            yield Operation("attention", what, torch.bfloat16, flops, moved, attend)


def convolutions(device: torch.device, *, small: bool) -> Iterator[Operation]:
    """Convolutions of ResNet-50, and a depthwise one."""
    shapes = (
        [(2, 8, 16, 8, 3, 1)]
        if small
        else [
            (32, 64, 56, 64, 3, 1), (32, 256, 14, 256, 3, 1), (32, 512, 7, 512, 3, 1),
            (32, 256, 56, 64, 1, 1), (32, 1024, 14, 256, 1, 1), (16, 192, 48, 192, 3, 192),
        ]
    )  # fmt: skip
    for batch, channels, side, out, size, groups in shapes:
        images = torch.randn(batch, channels, side, side, device=device, dtype=torch.bfloat16)
        weights = torch.randn(
            out, channels // groups, size, size, device=device, dtype=torch.bfloat16
        )

        def convolve(
            images: Tensor = images,
            weights: Tensor = weights,
            padding: int = size // 2,
            groups: int = groups,
        ) -> Tensor:
            return functional.conv2d(images, weights, padding=padding, groups=groups)

        results = batch * out * side**2
        yield Operation(
            "convolution", f"{batch}x{channels}x{side}x{side} to {out}, {size}x{size}, {groups}",
            torch.bfloat16, 2 * results * (channels // groups) * size**2,
            2 * (images.numel() + weights.numel() + results), convolve,
        )  # fmt: skip


def traffic(device: torch.device, *, small: bool) -> Iterator[Operation]:
    """Operations that memory bounds, on rows of a transformer's width."""
    dtype, width = torch.bfloat16, 64 if small else 4096
    for rows in (64,) if small else (512, 4096, 32768):
        x = torch.randn(rows, width, device=device, dtype=dtype)
        table = torch.randn(rows, width, device=device, dtype=dtype)
        picks = torch.randint(0, rows, (rows,), device=device)
        size = x.numel() * x.element_size()
        cases: list[tuple[str, str, int, Callable[[], Any]]] = [
            ("elementwise", "copy", 2, lambda x=x: x.clone()),
            ("elementwise", "add", 3, lambda x=x, y=table: x + y),
            ("elementwise", "gelu", 2, lambda x=x: functional.gelu(x)),
            ("reduction", "layer norm", 2, lambda x=x: functional.layer_norm(x, x.shape[-1:])),
            ("reduction", "softmax", 2, lambda x=x: torch.softmax(x, -1)),
            ("reduction", "sum", 1, lambda x=x: x.sum(-1)),
            ("embedding", "rows", 2, lambda p=picks, t=table: functional.embedding(p, t)),
        ]
        for kind, name, passes, run in cases:
            yield Operation(kind, f"{name} of {rows}x{width}", dtype, 0, passes * size, run)


def overhead(device: torch.device) -> float:
    """Return the time of an operation that has next to nothing to do."""
    x = torch.zeros(1, device=device)
    return time_operation(lambda: x.add_(1), device)


def copies(device: torch.device, *, small: bool) -> dict[str, float]:
    """Return the bandwidth between the host's pinned memory and the device, bytes a second."""
    if device.type == "cpu":
        return {}
    size = 2**20 if small else 2**28
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return {
        "to_device": size / time_operation(lambda: there.copy_(here, non_blocking=True), device),
        "to_host": size / time_operation(lambda: here.copy_(there, non_blocking=True), device),
    }


def efficiencies(rows: list[dict[str, Any]], device: str) -> dict[str, float]:
    """Return each class's share of the data sheet's rate, by its best operation.

    Empty for a device that the estimator does not know.
    """
    known = find_by_driver_name(torch.cuda.get_device_name()) if device == "cuda" else None
    if known is None:
        return {}
    best: dict[str, float] = {}
    for row in rows:
        precision: Precision = "bfloat16" if row["dtype"] == "bfloat16" else "float32"
        key = f"{row['kind']} {precision}"
        by_memory = row["bytes_per_s"] / known.bandwidth_bytes_per_s
        by_arithmetic = row["flops_per_s"] / known.peak_flops_per_s(precision)
        share = by_arithmetic if row["flops_per_s"] else by_memory
        best[key] = max(best.get(key, 0.0), share)
    return best


if __name__ == "__main__":
    sys.exit(run_program(device_table, asks_cuda=True))
