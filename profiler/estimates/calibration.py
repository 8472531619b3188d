"""Efficiencies that make estimates agree with what was measured.

The fit minimises the squared logarithm of estimated over measured time, summed over all parts of
all measured models with each part weighted by its share of its model's time. The same term for each
whole model is added, and a small pull towards the usual efficiencies, which leaves classes of
operations without measurements unchanged. The search changes one efficiency at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.cluster.accelerators import Precision
from ...core.errors import InvalidInput
from ...core.graph.tensors import RANDN_DTYPES, DType
from ...core.profile.profile import Profile
from .flops import Cost
from .layer_costs import ModelWork
from .roofline import RATES, CostTable, DeviceRates

TENSORS: dict[Precision, DType] = {
    "float32": "float32",
    "tf32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
"""What tensors are of at each precision."""

FLOATING = RANDN_DTYPES - {"complex64", "complex128"}


def check_settings(profile: Profile, precision: Precision, num_threads: int | None) -> None:
    """Insist that a profile may calibrate an estimate at that precision (and threads, on a CPU)."""
    found = profile.provenance
    if found.autocast:
        _refuse(profile, f"under autocast to {found.autocast}", f"at {precision} throughout")
    if found.compiled:
        _refuse(profile, "compiled", "without compilation")
    dtype = floating_dtype(profile)
    if dtype is not None and dtype != TENSORS[precision]:
        _refuse(profile, f"in {dtype}", f"in {TENSORS[precision]} (--precision)")
    if found.tf32 is not None and dtype == "float32":
        as_tf32 = found.tf32.startswith("products")
        if as_tf32 != (precision == "tf32"):
            ran = "tf32" if as_tf32 else "float32"
            _refuse(profile, f"with products in {ran}", f"at {precision} (--precision)")
    if num_threads is not None and found.num_threads != num_threads:
        threads = "an unknown number of" if found.num_threads is None else found.num_threads
        _refuse(profile, f"with {threads} threads", f"with {num_threads} (--threads)")


def floating_dtype(profile: Profile) -> DType | None:
    """Return the dtype of most floating tensors between layers, else of inputs, else `None`."""
    between = [tensor for boundary in profile.boundaries for tensor in boundary.tensors]
    for tensors in (between, profile.inputs):
        floating = [tensor.dtype for tensor in tensors if tensor.dtype in FLOATING]
        if floating:
            return Counter(floating).most_common(1)[0][0]
    return None


def _refuse(profile: Profile, measured: str, wanted: str) -> None:
    raise InvalidInput(
        f"the profile of {profile.model} was measured {measured}, and the estimate is {wanted}; "
        "calibrate by profiles measured with the settings of the estimate",
        field="/calibrate_by",
    )


PULL = 0.01
"""Weight of a factor e on an efficiency, against the same factor on a whole model's time."""

FINEST_STEP = 1.01
LARGEST_CHANGE = 100.0
"""Largest factor between an efficiency and its usual value."""


@dataclass(frozen=True)
class CalibrationPoint:
    """One model's parts: what they do and how long they took."""

    costs: Sequence[Iterable[Cost]]
    measured_s: Sequence[float]


def make_calibration_point(work: ModelWork, profile: Profile) -> CalibrationPoint:
    """Pair estimated work with measured times, of every layer and of the loss if both have one."""
    measured = [(entry.forward.median_s, entry.backward.median_s) for entry in profile.layers]
    parts = list(work.layers)
    if work.loss is not None and profile.loss is not None:
        measured.append((profile.loss.forward.median_s, profile.loss.backward.median_s))
        parts.append(work.loss)
    costs = [costs for part in parts for costs in (part.forward, part.backward)]
    return CalibrationPoint(costs, [time_s for pair in measured for time_s in pair])


class _Errors:
    """Sum of the errors of all calibration points, to be minimised."""

    def __init__(self, observations: Sequence[CalibrationPoint]) -> None:
        self._table = CostTable([costs for entry in observations for costs in entry.costs])
        self._models: list[tuple[slice, NDArray[np.float64]]] = []
        start = 0
        for entry in observations:
            stop = start + len(entry.measured_s)
            self._models.append((slice(start, stop), np.array(entry.measured_s)))
            start = stop

    def __call__(self, rates: DeviceRates) -> float:
        estimated = self._table.seconds(rates)
        total = 0.0
        for span, measured in self._models:
            times = estimated[span]
            # Logarithms need both: a part without operations is estimated at 0 s, and counts only
            # through its model's total.
            known = (measured > 0) & (times > 0)
            shares = measured[known] / measured[known].sum()
            total += float(shares @ np.log(times[known] / measured[known]) ** 2)
            total += float(np.log(times.sum() / measured.sum()) ** 2)
        return total


def calibrate(start: DeviceRates, observations: Sequence[CalibrationPoint]) -> DeviceRates:
    """Fit the rates that estimate the observations best."""
    errors = _Errors(observations)
    moved = dict.fromkeys(RATES, 0.0)  # logarithm of each one's change so far

    def price(rates: DeviceRates) -> float:
        return errors(rates) + PULL * sum(change**2 for change in moved.values())

    rates, step = start, 2.0
    best = price(rates)
    # Coordinate search: each rate is tried a step up and down; once no rate gains, the step
    # shrinks to its square root.
    while step > FINEST_STEP:
        improved = False
        for name in RATES:
            for factor in (step, 1 / step):
                change = float(np.log(factor))
                if abs(moved[name] + change) > np.log(LARGEST_CHANGE):
                    continue
                moved[name] += change
                tried = rates.scaled(name, factor)
                found = price(tried)
                # A gain within rounding would keep the loop at this step without end.
                if found < best - 1e-12:
                    rates, best, improved = tried, found, True
                    break
                moved[name] -= change
        if not improved:
            step = step**0.5
    return rates
