"""Basis of an estimate's numbers: a table of the device, a rule from others, or a guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...core.cluster.accelerators import Accelerator, Precision
from .calibration_table import CalibrationTable
from .device_table import Basis, load_gpu_table
from .error_band import ModelClass, kernel_bands
from .flops import OPERATION_CLASSES, OperationClass
from .layer_costs import LayerWork

WORDS: dict[OperationClass, str] = {
    "matmul": "matrix products",
    "attention": "attention",
    "convolution": "convolutions",
    "elementwise": "elementwise operations",
    "reduction": "normalisations and sums",
    "embedding": "embeddings",
}


def model_class(parts: Sequence[LayerWork], precision: Precision) -> ModelClass:
    """Return the class whose error band holds for a model."""
    flops = {kind: 0 for kind in OPERATION_CLASSES}
    for cost in (cost for part in parts for cost in part.forward):
        flops[cost.kind] += cost.flops
    if flops["convolution"] > flops["matmul"] + flops["attention"]:
        return "convolutional net"
    return "32-bit transformer" if precision == "float32" else "16-bit transformer"


def describe_basis(
    device: Accelerator,
    precision: Precision,
    parts: Sequence[LayerWork],
    num_profiles: int = 0,
    kept: CalibrationTable | None = None,
) -> tuple[str, ...]:
    """Return what every kind of operation of a model rests on, a phrase each."""
    if num_profiles:
        return (f"all operations: fitted to {num_profiles} measured profiles",)
    if kept is not None:
        when = f"{kept.device_name}, {kept.measured_on}"
        return (f"all operations: table (calibrated on {when})",)
    if device.backend == "cpu":
        return ("all operations: guess (usual efficiencies of a core)",)
    kinds = {cost.kind for part in parts for cost in (*part.forward, *part.backward)}
    table = load_gpu_table()
    products = table.product_share(device, precision)[1]
    memory = table.memory_share(device)[1]
    basis: dict[OperationClass, Basis] = {
        "matmul": products,
        # Their share of what products sustain is one figure for all devices.
        "attention": "rule",
        "convolution": "guess",
        "elementwise": memory,
        "reduction": "rule",
        "embedding": "rule",
    }
    bands = kernel_bands(device, precision)
    return (*_phrases(kinds, basis, bands), "starting of kernels: guess")


def _phrases(
    kinds: Iterable[OperationClass],
    basis: Mapping[OperationClass, Basis],
    bands: Mapping[str, float],
) -> list[str]:
    guess = f"±{max(bands.values()):.0%}, not measured"
    return [
        f"{WORDS[kind]}: {basis[kind]} "
        f"(kernels {f'±{bands[kind]:.0%}' if kind in bands else guess})"
        for kind in OPERATION_CLASSES
        if kind in kinds
    ]
