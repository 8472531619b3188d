"""How far two tensors are apart, in one number."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_NORM = 1e-150
"""Stands in for a norm of zero; its square is still a number."""


def relative_difference(found: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of the expected tensor, in double precision.

    Infinities and NaN must stand in the same places; where they do not, the difference is
    infinite.

    Args:
        found: One tensor.
        expected: The one it is held against.
        floor: Used as the norm of ``expected`` where that is smaller.
    """
    if found.shape != expected.shape:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    ours, theirs = found.detach().to(wide), expected.detach().to(wide)
    finite = theirs.isfinite()
    if not finite.all():
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if not bool((finite | same).all()):
            return float("inf")
        ours, theirs = ours[finite], theirs[finite]
    difference = float((ours - theirs).norm())
    if difference != difference:
        return float("inf")
    return difference / max(float(theirs.norm()), floor, SMALLEST_NORM)
