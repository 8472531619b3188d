"""Errors of a device's products predicted by its own other rows, which no rule can beat by much.

Rows of one device contradict each other: clocks fall under load, and libraries choose kernels by
rules of their own. A row is predicted here by a plane through its nearest neighbours among the
device's other rows, which no rule for unseen devices can have; the number of neighbours is the best
of several, chosen with all rows in sight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from truth_rows import Row

NEIGHBOURS = (4, 6, 10, 16, 30)

RIDGE = 0.5
"""Draws the plane's slopes to none, so that few neighbours determine it."""

LARGE = 4096
"""Rows of the result from which products are judged."""


def find_floors(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean relative error of large products by set."""
    by_device = defaultdict(list)
    for row in rows:
        if "products" in row.group and row.launch == "kernel":
            by_device[row.group, row.device].append(row)
    errors = defaultdict(list)
    for (group, _), members in by_device.items():
        if len(members) > max(NEIGHBOURS):
            errors[group].append(_predict(members))
    return {group: float(np.mean(np.concatenate(found))) for group, found in errors.items()}


def _predict(rows: Sequence[Row]) -> NDArray[np.float64]:
    shapes = np.log2([row.parts[0][0].shape for row in rows])
    rates = shapes.sum(axis=1) - np.log2([row.measured_s for row in rows])
    large = [index for index, row in enumerate(rows) if row.facts["m"] >= LARGE]
    tried = [
        np.array([abs(2 ** (rates[i] - _plane(shapes, rates, i, count)) - 1) for i in large])
        for count in NEIGHBOURS
    ]
    return min(tried, key=np.mean) if large else np.zeros(0)


def _plane(
    shapes: NDArray[np.float64], rates: NDArray[np.float64], index: int, count: int
) -> float:
    away = shapes - shapes[index]
    distances = (away**2).sum(axis=1)
    distances[index] = np.inf
    near = np.argsort(distances)[:count]
    weights = 1 / (0.1 + np.sqrt(distances[near]))
    design = np.column_stack([np.ones(count), away[near]])
    draw = np.diag([0.0] + [RIDGE] * shapes.shape[1])
    return float(
        np.linalg.solve(
            design.T @ (weights[:, None] * design) + draw, design.T @ (weights * rates[near])
        )[0]
    )
