"""Sampling: repeats go to the layers whose spread makes the total uncertain."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median, quantiles

TOTAL_ERROR = 0.005
"""Standard error of the sum over all layers, relative to it, that is good enough."""

IQR_TO_ERROR = 1.2533 / 1.349
"""From quartile distance to the standard error of a median of one: a normal distribution's
quartiles are 1.349 standard deviations apart, its sample median errs 1.2533 times as much as its
mean (sqrt(pi / 2))."""

GOLDEN_SECTION = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly however many there are (Knuth, vol. 3, 6.4)."""


def standard_error(samples: Sequence[float]) -> float:
    """Return the standard error of the samples' median; infinite for fewer than two."""
    if len(samples) < 2:
        return float("inf")
    lower, _, upper = quantiles(samples, n=4, method="inclusive")
    return IQR_TO_ERROR * (upper - lower) / sqrt(len(samples))


def worth_repeating(
    samples: Sequence[Sequence[float]], counts: Sequence[int], error: float = TOTAL_ERROR
) -> list[int]:
    """Choose the layers to measure again; none once the total is certain enough.

    The errors of layers add up as their squares; that of a layer that stands for ``count`` equal
    ones counts so many times. Those with the largest share are chosen until what the others
    contribute is at most half of the allowed standard error, which is relative to the total.
    """
    # Variances of independent layers add up; a layer that stands for `count` equal ones has one
    # sample for all of them, so its errors are fully correlated and count squared.
    shares = [
        (count * standard_error(durations)) ** 2
        for durations, count in zip(samples, counts, strict=True)
    ]
    total = sum(
        count * median(durations) if durations else 0.0
        for durations, count in zip(samples, counts, strict=True)
    )
    allowed = (error * total) ** 2
    if sum(shares) <= allowed:
        return []
    # Largest shares first, until the rest cannot use up more than half of what is allowed: the
    # other half is left for the chosen layers, whose error shrinks with the next repeat.
    chosen: list[int] = []
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        rest = sum(share for i, share in enumerate(shares) if i not in chosen)
        if chosen and rest <= allowed / 2:
            break
        chosen.append(index)
    return sorted(chosen)


def representative(members: Sequence[int], turn: int) -> int:
    """Another member every turn, spread evenly over all of them, the middle one first.

    A layer measured every time would find its weights in the cache; in the model all its equals
    have been in between.
    """
    return members[int(len(members) * ((0.5 + turn * GOLDEN_SECTION) % 1.0))]
