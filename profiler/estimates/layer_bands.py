"""Error bands of layers, from those of their classes of kernels.

An error of a class of kernels is one of the device's, shared by all its layers. What it may change
about a plan is how long one layer takes against another. Within a model such errors cancel in part:
single kernels keep to wider bands than whole models, whose bands are measured apart. So a layer's
band is the mean of its classes', weighted by time, times one factor for all layers, with which
their own mean is the model's band.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from .flops import OPERATION_CLASSES

DIGITS = 3
"""Of a band; more of a measured quantile says nothing."""


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
    if not bands or not times.sum():
        return [None] * len(times)
    guess = max(bands.values())
    each = np.array([bands.get(kind, guess) for kind in OPERATION_CLASSES])
    waiting = np.maximum(times - by_class.sum(axis=1), 0.0)
    spreads = by_class @ each + waiting * guess  # seconds that each layer may be off
    factor = whole * times.sum() / spreads.sum()
    return [
        round(float(factor * spread_s / time_s), DIGITS) if time_s else None
        for spread_s, time_s in zip(spreads, times, strict=True)
    ]
