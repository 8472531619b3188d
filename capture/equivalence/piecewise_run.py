"""Piecewise run of a model with only tensors between the pieces, as on separate machines.

Every piece receives detached tensors, and gradients are passed back explicitly: whatever bypasses
a cut (a shared view, a hook, a constant written to) shows as a difference from the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CaptureError
from ...core.graph.graph import Boundary
from ...core.graph.tensors import TensorSpec
from ..observation.interception import AccessWatch
from ..observation.preserve import save_random_state
from ..program.program import storage_key


def _check_shapes(values: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    for value, spec in zip(values, specs, strict=True):
        if tuple(value.shape) != spec.shape:
            raise CaptureError(
                f"the shape of {spec.name!r} depends on data: {spec.shape} on the sample, "
                f"{tuple(value.shape)} on other inputs"
            )


class PiecewiseRun:
    """One micro-batch's way forward through the pieces of a model, and back.

    Pieces take flat tensors and return a tuple of them; the boundaries say which of the tensors
    that cross a cut need a gradient. Each piece gets copies, since pieces may work in place. Random
    numbers follow the micro-batch, whatever runs between two of its pieces.
    """

    def __init__(self, boundaries: Sequence[Boundary], flat: Sequence[Tensor]) -> None:
        self._boundaries = boundaries
        self._received: list[list[Tensor]] = []
        self._sent: list[tuple[Any, ...]] = []
        self._flat = [tensor.clone() for tensor in flat]
        self._restore_random_state = save_random_state()

    def run_piece(self, model: nn.Module, piece: nn.Module) -> None:
        """Run the next piece.

        Raises:
            CaptureError: It reads a parameter or buffer of the model that it does not hold.
        """
        values: list[Any] = self._flat
        if self._sent:
            specs = self._boundaries[len(self._sent) - 1].tensors
            _check_shapes(self._sent[-1], specs)
            self._received.append(
                [
                    value.detach().requires_grad_(spec.requires_grad)
                    for value, spec in zip(self._sent[-1], specs, strict=True)
                ]
            )
            values = [value.clone() for value in self._received[-1]]
        self._restore_random_state()
        with _watch_accesses(model, piece):
            self._sent.append(tuple(piece(*values)))
        self._restore_random_state = save_random_state()

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


def _watch_accesses(model: nn.Module, piece: nn.Module) -> AccessWatch:
    # All pieces share this process's objects, so a piece that reaches a weight of another one,
    # through whatever reference, would compute the right values here and nowhere else.
    held = {storage_key(tensor) for tensor in (*piece.parameters(), *piece.buffers())}

    def check(key: int, name: str, written: bool) -> None:
        if key not in held:
            raise CaptureError(f"a layer reads {name!r}, which is not among its own weights")

    return AccessWatch(model, check)
