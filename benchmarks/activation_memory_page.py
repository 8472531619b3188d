"""The page `benchmarks/activation_memory.py` writes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

INTRODUCTION = """\
# Memory: predicted and measured

Written by \
`python benchmarks/activation_memory.py --write docs/evidence/activation-memory.md`, with \
torch {torch} on {device}. The models are small and entangled on purpose \
(`benchmarks/memory_models.py`): dropout masks, batch statistics, attention in one kernel and by \
its steps, recurrent layers, skips across the model, operations in place, recomputed blocks, \
autograd functions that keep tensors by name and by attribute, tied weights.

Measured is what torch's allocator handed out: on the CPU every call it records for the profiler, \
on CUDA `torch.cuda.memory_allocated` and `max_memory_allocated`. No hook of autograd takes part. \
The table itself is not made by hooks either: each layer is run once, everything is let go but its \
graph, and what then disappears with the graph was kept by it (`profiler/layers/saved_storages.py`).

## What autograd keeps

An interval of layers is run as a stage on the values it really receives, its outputs and inputs \
are let go, and what is still allocated is compared with the sum of the distinct storages that the \
profile's table lists for its layers. What a stage receives counts where a layer keeps it. The \
loss is left out here.

| model | layers | kept by the whole model | predicted | error | intervals | largest error |
|---|---|---|---|---|---|---|
"""

PEAKS = """
{intervals} random intervals: the largest error is {worst_interval:.4%} (limit \
{limit_interval:.0%}); of whole models {worst_whole:.4%} (limit {limit_whole:.0%}). Left over are \
scalars of 8 bytes that attention computes with. Not counted is the state of the host's random \
generator that `torch.utils.checkpoint` keeps unless told not to, 5,056 bytes a call.

## Peaks of stages

A stage's rank, alone: receive buffers, forwards and backwards in the order of its schedule, \
gradients and Adam's state in place, outputs kept until their backward as torch's engine does. \
Compared with the plan's total: weights, gradients, optimizer state, saved activations of the \
micro-batches in flight, workspace, receive buffers ([planner.md](planner.md), "Memory of a \
device"). The optimizer's update, which comes after, is not part of either.

| model | schedule | stage | in flight | predicted | measured | error | twice | left out |
|---|---|---|---|---|---|---|---|---|
"""

RECOMPUTED = """
{count} stages: median error {median:.1%} (limit {limit:.0%}), from {least:+.1%} to {most:+.1%}.

## Recomputed stages

The same, with every stage run again in its backward (`torch.utils.checkpoint`). The first stage's \
prediction has the model's own inputs in it, which the measurement has not.

| model | schedule | stage | in flight | predicted | measured | error |
|---|---|---|---|---|---|---|
"""

REMARKS = """
## Why

Where the prediction is off, and which way:

- Too little, "left out": what a stage sends is kept until its backward, also where no layer \
keeps it. Up to {most_left_out:.1%} of the measured peak (median {median_left_out:.1%}), most in \
U-Nets, whose stages pass skips on.
- Too little: scratch memory inside a kernel is not seen on the CPU (recurrent layers have some); \
on CUDA it is, by the allocator's own peak.
- Too much, "twice": what a stage receives is counted in the receive buffers and, where a layer \
keeps it, among the saved activations. A stage with a layer that works in place does hold both, \
since it works on copies; another computes on the buffer itself. Up to {most_twice:.1%} (median \
{median_twice:.1%}).
- Too much: workspace is the largest of any layer's, on top of everything saved; when an early \
layer's backward needs it, later layers have let go of theirs.
- On CUDA sizes in the table are rounded up to blocks of 512 bytes as the caching allocator does; \
the segments it reserves from the device (2 MiB, 20 MiB, multiples of 2 MiB) are not part of \
`memory_allocated` (`profiler/machine/memory.py`).
- Optimizer state is 8 bytes an element for Adam, two fp32 moments, and 4 for momentum. That is \
what `torch.optim` keeps for fp32 parameters (and 4 bytes a parameter tensor for the step count); \
for parameters in bf16 it keeps half, unless it is given fp32 copies of them.
"""


def page(result: dict[str, Any]) -> str:
    """Return the whole document."""
    limits = result["limits"]
    errors = [row["relative_error"] for row in result["peaks"]]
    text = INTRODUCTION.format(torch=result["torch"], device=result["device"].upper())
    text += "".join(f"{line}\n" for line in _models(result))
    text += PEAKS.format(
        intervals=len(result["intervals"]),
        worst_interval=result["worst_interval"],
        worst_whole=result["worst_whole"],
        limit_interval=limits["interval"],
        limit_whole=limits["whole"],
    )
    text += "".join(f"{line}\n" for line in _peaks(result["peaks"], edges=True))
    text += RECOMPUTED.format(
        count=len(errors),
        median=statistics.median(abs(error) for error in errors),
        limit=limits["median_peak"],
        least=min(errors),
        most=max(errors),
    )
    text += "".join(f"{line}\n" for line in _peaks(result["recomputed_peaks"], edges=False))
    return text + REMARKS.format(**_edges(result))


def _edges(result: dict[str, Any]) -> dict[str, float]:
    """Return the largest and the middle share of a peak that is left out, and counted twice."""
    figures = {}
    for word in ("left_out", "twice"):
        key = "left_out_bytes" if word == "left_out" else "counted_twice_bytes"
        shares = [row[key] / row["measured_bytes"] for row in result["peaks"]]
        figures[f"most_{word}"] = max(shares)
        figures[f"median_{word}"] = statistics.median(shares)
    return figures


def _models(result: dict[str, Any]) -> Iterator[str]:
    for whole in result["wholes"]:
        runs = [row for row in result["intervals"] if row["model"] == whole["model"]]
        worst = max((abs(row["relative_error"]) for row in runs), default=0.0)
        yield (
            f"| {whole['model']} | {whole['last']} | {whole['held_bytes']:,} "
            f"| {whole['predicted_bytes']:,} | {whole['relative_error']:+.4%} "
            f"| {len(runs)} | {worst:.4%} |"
        )


def _peaks(rows: list[dict[str, Any]], *, edges: bool) -> Iterator[str]:
    for row in rows:
        line = (
            f"| {row['model']} | {row['schedule']} | {row['stage'] + 1} of {row['stages']} "
            f"| {row['in_flight']} | {row['predicted_bytes'] / 2**20:.2f} MiB "
            f"| {row['measured_bytes'] / 2**20:.2f} MiB | {row['relative_error']:+.1%} |"
        )
        if edges:
            line += (
                f" {row['counted_twice_bytes'] / row['measured_bytes']:.1%} "
                f"| {row['left_out_bytes'] / row['measured_bytes']:.1%} |"
            )
        yield line
