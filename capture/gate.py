"""Checks that a traced model is the model: wrong captures must be loud."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import CaptureError
from .state import preserved

if TYPE_CHECKING:
    from .capture import Captured

RELATIVE_TOLERANCE = 1e-3
"""Norm of the difference over the norm. A wrong graph is off by far more; another kernel for
the same operation (flash instead of math attention) by far less."""


SMALLEST_NORM = 1e-150
"""Stands in for a norm of zero; its square is still a number."""


def refuse_custom_functions(outputs: list[Any], ways_out: str) -> None:
    """Refuse models whose autograd graph holds a Python ``autograd.Function``.

    Tracers replace such a function by the derivative of its forward, silently.

    Raises:
        CaptureError: One was found; the message names it.
    """
    pending = [leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor) and leaf.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            raise CaptureError(
                f"the custom autograd function {name!r} would lose its own backward when traced. "
                + ways_out,
                operation=name,
            )
        pending += [parent for parent, _ in node.next_functions if parent is not None]


def check_forward(
    captured: Captured, flat: tuple[Tensor, ...], expected: list[Any], ways_out: str
) -> None:
    """Run the traced model from the same random state and compare outputs.

    Raises:
        CaptureError: An output differs.
    """
    segment = captured.segment(0, len(captured.layers))
    with preserved(captured.program.model), torch.no_grad():
        found = segment(*flat)
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(theirs, Tensor):
            continue
        error = relative_difference(ours, theirs)
        if not error <= RELATIVE_TOLERANCE:
            raise CaptureError(
                f"the traced model's output {position} differs from the model's own by "
                f"{error:.2g} (relative); something in forward escapes the tracer, for instance "
                f"Python's own random numbers. {ways_out}"
            )


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor, in double precision."""
    if found.shape != expected.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    wide: torch.dtype = torch.complex128 if expected.is_complex() else torch.float64
    reference = expected.detach().to(wide)
    difference = float((found.detach().to(wide) - reference).norm())
    return difference / max(float(reference.norm()), SMALLEST_NORM)
