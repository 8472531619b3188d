"""Error bands of models and of kernels, from comparisons with measurements.

Of a CPU the figures are written by ``benchmarks/estimate.py --write``. Of GPUs they stand in
`tables/gpu.json`, by class of model and of kernel: 90 % of the rows of chips left out of the fit
keep to them (``benchmarks/truth.py``). `docs/evidence/estimates.md` and `docs/evidence/truth.md`
show every comparison behind them.

An error of a class of kernels is one of the device's, shared by all its layers. What it may change
about a plan is how long one layer takes against another. Within a model such errors cancel in part:
single kernels keep to wider bands than whole models, whose bands are measured apart. So a layer's
band is the mean of its classes', weighted by time, times one factor for all layers, with which
their own mean is the model's band.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...core.cluster.accelerators import Accelerator, Precision
from .calibration_table import CalibrationTable
from .device_table import arithmetic, load_gpu_table
from .flops import OPERATION_CLASSES

ModelClass = Literal["16-bit transformer", "32-bit transformer", "convolutional net"]
"""What an error band is of: where most of a model's operations are, and their precision."""

DIGITS = 3
"""Decimal digits of a band; a measured quantile has no more."""


@dataclass(frozen=True)
class MeasuredError:
    """The error of a step's time over the models it was measured on, and what it is of."""

    largest: float
    where: str


# written by benchmarks/estimate.py
CPU_UNCALIBRATED = MeasuredError(1.275, "6 models on one CPU")
CPU_CALIBRATED = MeasuredError(0.189, "6 models on one CPU")
GPU_UNCALIBRATED = MeasuredError(
    0.444, "4 convolutional nets in float32 on a V100 (published with PipeDream)"
)
GPU_CALIBRATED = MeasuredError(
    0.331, "4 convolutional nets in float32 on a V100 (published with PipeDream)"
)
CPU_KERNELS_UNCALIBRATED: Mapping[str, float] = {
    "matmul": 0.439,
    "convolution": 1.577,
    "elementwise": 0.678,
    "reduction": 1.754,
}
CPU_KERNELS_CALIBRATED: Mapping[str, float] = {
    "matmul": 0.108,
    "convolution": 0.199,
    "elementwise": 0.61,
    "reduction": 3.146,
}
# end of what is written

BY_RULE = " by rule"
"""Suffix of the bands of devices whose rate follows from a rule, or from single published products:
those of devices left out with their chip, and no less than those of devices that were measured."""

UNMEASURED_BACKEND = 1.5
"""Factor on the band for AMD's devices, of which one was measured, and in float32 alone."""


def measured_error(
    device: Accelerator, model: ModelClass, *, is_calibrated: bool, is_measured: bool
) -> MeasuredError:
    """Return the error to expect of an estimate for a device and a class of model.

    ``is_measured`` says whether products of the precision were measured on the device.
    """
    if device.backend == "cpu":
        return CPU_CALIBRATED if is_calibrated else CPU_UNCALIBRATED
    if is_calibrated:
        return GPU_CALIBRATED
    if model == "convolutional net":
        return GPU_UNCALIBRATED
    band = load_gpu_table().bands[model if is_measured else model + BY_RULE]
    what = "devices" if is_measured else "chips"
    where = f"nine of ten {model}s on {what} left out of the fit (docs/evidence/truth.md)"
    if device.backend == "rocm":
        return MeasuredError(round(band * UNMEASURED_BACKEND, 3), where + "; few were AMD's")
    return MeasuredError(band, where)


def kernel_bands(
    device: Accelerator,
    precision: Precision,
    *,
    is_calibrated: bool = False,
    kept: CalibrationTable | None = None,
) -> Mapping[str, float]:
    """Return the bands of kernels by class of operation, without classes nobody measured."""
    if kept is not None and not is_calibrated:
        return kept.bands
    if device.backend == "cpu":
        return CPU_KERNELS_CALIBRATED if is_calibrated else CPU_KERNELS_UNCALIBRATED
    return load_gpu_table().kernel_bands[arithmetic(precision)]


def list_layer_bands(
    times: NDArray[np.float64],
    by_class: NDArray[np.float64],
    bands: Mapping[str, float],
    whole: float,
) -> list[float | None]:
    """Return each layer's band; `None` where only the model's is known.

    Args:
        times: Seconds of each layer.
        by_class: Seconds that its operations run, a column for each class; what these lack of its
            time is a guess, like the classes without a band.
        bands: Of single kernels, by class; a guess is as wide as the widest of them.
        whole: Band of the model.
    """
    guess = max(bands.values(), default=0.0)
    each = np.array([bands.get(kind, guess) for kind in OPERATION_CLASSES])
    waiting = np.maximum(times - by_class.sum(axis=1), 0.0)
    spreads = by_class @ each + waiting * guess  # seconds that each layer may be off
    # No band, no time, or a table that fits its own operations exactly.
    if not spreads.any():
        return [None] * len(times)
    factor = whole * times.sum() / spreads.sum()
    return [
        round(float(factor * spread_s / time_s), DIGITS) if time_s else None
        for spread_s, time_s in zip(spreads, times, strict=True)
    ]


def error_note(error: MeasuredError) -> str:
    """Describe the expected error and where it was measured."""
    return f"step times were up to {error.largest:.0%} off on {error.where}"
