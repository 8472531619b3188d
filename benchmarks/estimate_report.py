"""`docs/evidence/estimates.md`: how estimates are made, how far off they were, and all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from tables import markdown_table

from stagewright.core.cluster.accelerators import CATALOGUE, Accelerator
from stagewright.profiler.estimates.flops import OPERATION_CLASSES
from stagewright.profiler.estimates.roofline import (
    CPU_EFFICIENCY,
    CPU_OVERHEAD_S,
    CPU_TRAFFIC,
)

if TYPE_CHECKING:
    from estimate import Row

INTRODUCTION = """# Estimates without the device

Written by `python benchmarks/estimate.py --pipedream FOLDER --write`; FOLDER holds the profiles
of PipeDream's repository.

`stagewright estimate gpt2-xl --device H100` and `stagewright plan gpt2-xl --devices 4x24GB` need no
GPU, no weights and no network. The model is built and captured on torch's meta device, where
tensors have shapes and no memory, so neither it nor its sample has to fit. A model of your own is
`stagewright.estimate(model, sample, device="H100")`; one that branches on its data, or draws random
numbers in blocks that are recomputed, does not run without values and has to be measured. Every
operation of every layer's forward and backward is looked at there:

- its FLOPs, from its shapes (a multiplication and an addition are two). Attention counts as the
  fused kernel a device runs, half of it where it is causal; grouped products of experts count the
  rows each expert meets;
- its bytes: what it reads and writes, once;
- what it keeps for the backward, by the very code that measures it. On the nine small models of
  `tests/profiler/estimates/test_memory.py` the storage table, the workspace and the output bytes
  equal those of a real run to the byte.

On a CPU an operation takes

    max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency)) + overhead

with peak and bandwidth from the catalogue below. On a GPU the tiles of a product's shape are
counted in waves over the multiprocessors, caches and power limits are known, and the host starts
kernels while others run (`profiler/estimates/kernel_model.py`; its figures are in
`profiler/estimates/tables/gpu.json`). A profile says what its numbers rest on: a table of the
device, a rule from others, or a guess. `stagewright calibrate` measures the table of the device at
hand, which `estimate` then uses. `--calibrate profile.json` (in Python
`calibrate_by=[...]`) fits efficiencies and overhead to profiles measured on the same kind of
device. Not known to it: kernels a library chooses for unlucky shapes, and other work on the host.
**Measure before you buy or train**; an estimate tells which plans are worth measuring. Everything
planned from one is labelled ESTIMATED, with its error.

Weights, gradients and activations take the type given by `--precision` (bf16 on GPUs); the
optimizer's moments are float32 in any case, as in every plan.
"""

CPU_TEXT = """## On a CPU

{machine}, one thread, torch's eager mode, float32. Each model is estimated by usual efficiencies
of a generic core ("uncalibrated") and by those fitted to the profiles of the other five
("calibrated"); its own profile is never used. "Shares" is how much of the step is put down to the
wrong layer. Timed by the thread's own clock: other work ran on the machine.
"""

BANDS_TEXT = """Of layers that spend over 70 % of their time in one class, nine tenths (by time)
keep to these bands, from which [the bands of layers](truth.md#bands-of-kernels) follow.
"""

GPU_TEXT = """## On a GPU

**No GPU was measured for this project.** [Predictions against other people's
measurements](truth.md) has the errors of transformers, and their bands. Below are four of the
profiles published with PipeDream (Narayanan et al. 2019), convolutional nets in float32, timed
module by module on a GPU that the profiles do not name. Of that paper's it can only be the V100,
and notes call it so: a ReLU of 1.6 GB in `vgg16` moves 740 GB/s, more than the Titan X's memory
gives. The band printed for convolutional nets on GPUs is the largest of these errors. That
3 x 3 filters in float32 take Winograd's algorithm was put in after looking at these profiles; the
efficiencies were not.
"""


def report(
    cpu: Sequence[Row],
    gpu: Sequence[Row],
    machine: str,
    kernel_bands: Sequence[Mapping[str, float]],
) -> str:
    """Return the document."""
    return "\n".join(
        [
            INTRODUCTION,
            CPU_TEXT.format(machine=machine),
            _errors(cpu),
            BANDS_TEXT,
            _bands(kernel_bands),
            GPU_TEXT,
            _errors(gpu),
            "## Efficiencies used without a calibration",
            "",
            _efficiencies(),
            "",
            "The reason for each stands beside it in `profiler/estimates/roofline.py`.",
            "",
            "## The catalogue",
            "",
            "Dense rates in TFLOP/s. A link's bandwidth is the data sheet's, one direction; plans "
            "take less (docs/guides/clusters.md).",
            "",
            _catalogue(),
            "",
        ]
    )


def _errors(rows: Sequence[Row]) -> str:
    head = (
        "model",
        "measured step",
        "uncalibrated",
        "calibrated",
        "shares, uncalibrated",
        "calibrated",
    )
    table = [
        (
            row.name,
            f"{row.measured_s * 1e3:.0f} ms",
            *(f"{error:+.1%}" for error in row.step_errors),
            *(f"{error:.1%}" for error in row.share_errors),
        )
        for row in rows
    ]
    for name, of in (("largest", max), ("median", median)):
        steps = [f"{of(abs(row.step_errors[i]) for row in rows):.1%}" for i in (0, 1)]
        shares = [f"{of(row.share_errors[i] for row in rows):.1%}" for i in (0, 1)]
        table.append((name, "", *steps, *shares))
    return markdown_table(head, table, left=len(head)) + "\n"


def _bands(kernel_bands: Sequence[Mapping[str, float]]) -> str:
    head = ("", *OPERATION_CLASSES)
    rows = [
        (name, *(f"{bands[kind]:.1%}" if kind in bands else "guess" for kind in OPERATION_CLASSES))
        for name, bands in zip(("uncalibrated", "calibrated"), kernel_bands, strict=True)
    ]
    return markdown_table(head, rows, left=len(head)) + "\n"


def _efficiencies() -> str:
    head = ("", *OPERATION_CLASSES, "traffic of products", "overhead")
    rows = [
        (name, *(shares[kind] for kind in OPERATION_CLASSES), traffic, f"{overhead_s * 1e6:.0f} us")
        for name, shares, traffic, overhead_s in (
            ("CPU", CPU_EFFICIENCY, CPU_TRAFFIC, CPU_OVERHEAD_S),
        )
    ]
    return markdown_table(head, rows, left=len(head))


def _catalogue() -> str:
    head = (
        "name", "device", "float32", "tf32", "bf16", "fp16", "memory", "as torch reports",
        "bandwidth", "link", "source",
    )  # fmt: skip
    return markdown_table(head, map(_device, CATALOGUE), left=len(head))


def _device(entry: Accelerator) -> tuple[str, ...]:
    rates = [
        f"{entry.flops_per_s[name] / 1e12:g}" if name in entry.flops_per_s else ""
        for name in ("float32", "tf32", "bfloat16", "float16")
    ]
    memory = ("the machine's", "")
    if entry.memory_bytes:
        reported = f"{entry.memory_bytes / 2**30:.2f} GiB ({entry.memory_source})"
        memory = (f"{entry.memory_gb} GB", reported)
    return (
        entry.name,
        entry.full_name,
        *rates,
        *memory,
        f"{entry.bandwidth_bytes_per_s / 1e9:g} GB/s",
        f"{entry.link}, {entry.link_bandwidth_bytes_per_s / 1e9:g} GB/s",
        entry.source,
    )
