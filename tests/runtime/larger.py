"""The larger of two differences, NaN being larger than any."""

import math


def larger(one: float, other: float) -> float:
    """Return the larger difference; infinite if one is NaN, which `max` may leave out."""
    return math.inf if math.isnan(one) or math.isnan(other) else max(one, other)
