"""Error band of estimates, from comparisons with measured profiles.

The figures are written by ``benchmarks/estimate.py --write``; ``docs/evidence/estimates.md`` shows
every one of the comparisons behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.cluster.accelerators import Backend


@dataclass(frozen=True)
class MeasuredError:
    """The largest error of a step's time over the models it was measured on."""

    largest: float
    where: str


# written by benchmarks/estimate.py
CPU_UNCALIBRATED = MeasuredError(1.275, "6 models on one CPU")
CPU_CALIBRATED = MeasuredError(0.189, "6 models on one CPU")
GPU_UNCALIBRATED = MeasuredError(
    0.451, "4 convolutional nets in float32 on a V100 (published with PipeDream)"
)
GPU_CALIBRATED = MeasuredError(
    0.370, "4 convolutional nets in float32 on a V100 (published with PipeDream)"
)
# end of what is written


_UNMEASURED: dict[Backend, str] = {
    "cpu": "",
    "cuda": "; no other GPU was measured",
    "rocm": "; no other GPU was measured, and none of AMD's",
}


def measured_error(backend: Backend, is_calibrated: bool) -> MeasuredError:
    """Return the measured error of estimates for a kind of device."""
    if backend == "cpu":
        return CPU_CALIBRATED if is_calibrated else CPU_UNCALIBRATED
    return GPU_CALIBRATED if is_calibrated else GPU_UNCALIBRATED


def error_note(backend: Backend, is_calibrated: bool) -> str:
    """Describe the expected error and where it was measured."""
    found = measured_error(backend, is_calibrated)
    left_out = ", each estimated without its own profile" if is_calibrated else ""
    unmeasured = _UNMEASURED[backend]
    return f"step times were up to {found.largest:.0%} off on {found.where}{left_out}{unmeasured}"
