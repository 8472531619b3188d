"""Piecewise run of a model with only tensors between the pieces, as on separate machines.

Every piece receives detached tensors, and gradients are passed back explicitly: whatever bypasses
a cut (a shared view, a hook, a constant written to) shows as a difference from the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.graph.graph import Boundary


class PiecewiseRun:
    """One forward through pieces, ready for its backward.

    Pieces take flat tensors and return a tuple of them; the boundaries say which of the tensors
    that cross a cut need a gradient. With ``copy`` each piece gets copies, since pieces may work in
    place.
    """

    def __init__(
        self,
        pieces: Sequence[nn.Module],
        boundaries: Sequence[Boundary],
        flat: Sequence[Tensor],
        *,
        copy: bool = False,
    ) -> None:
        self._received: list[list[Tensor]] = []
        self._sent: list[tuple[Any, ...]] = []
        values: list[Any] = list(flat)
        for index, piece in enumerate(pieces):
            if index:
                specs = boundaries[index - 1].tensors
                values = [
                    value.detach().requires_grad_(spec.requires_grad)
                    for value, spec in zip(values, specs, strict=True)
                ]
                self._received.append(values)
                values = [value.clone() for value in values] if copy else values
            values = list(piece(*values))
            self._sent.append(tuple(values))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Return the last piece's outputs; differentiate them first, then call `backward`."""
        return self._sent[-1]

    def backward(self) -> None:
        """Propagate gradients from the last piece, already differentiated, to the first."""
        for index in reversed(range(len(self._received))):
            pairs = [
                (value, leaf.grad)
                for value, leaf in zip(self._sent[index], self._received[index], strict=True)
                if value.requires_grad and leaf.grad is not None
            ]
            if pairs:
                torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
