"""The loss function, measured as one more layer behind the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.captured import Captured
from ...core.errors import InvalidInput
from .layer_run import LayerRun

LossFunction = Callable[[Any, Tensor], Tensor]


class Loss:
    """``loss_fn(output, target)`` with its target."""

    def __init__(self, loss_fn: LossFunction, target: Tensor | None, device: torch.device) -> None:
        if target is None:
            raise InvalidInput("a loss needs a target; give target=")
        if not isinstance(target, Tensor):
            raise InvalidInput(f"a target is a tensor; found a {type(target).__name__}")
        self._loss_fn, self._target = loss_fn, target.to(device)

    def __call__(self, output: Any) -> Tensor:
        """Compute the loss of the model's output in its own structure."""
        loss = self._loss_fn(output, self._target)
        if not isinstance(loss, Tensor):
            raise InvalidInput(
                f"the loss function returned a {type(loss).__name__}; return the loss alone, as a "
                "tensor of one number"
            )
        if loss.numel() != 1:
            raise InvalidInput(
                f"the loss function returned {loss.numel()} numbers (shape {tuple(loss.shape)}), "
                "and a loss is one; reduce them, with .mean() or reduction='mean'"
            )
        return loss

    def run(self, captured: Captured) -> LayerRun:
        """Return the loss as a layer that reads the model's flat outputs."""
        outputs = captured.program.flat_outputs
        # A value returned twice is read once, and put in both of its places below.
        reads = list(dict.fromkeys(out for out in outputs if isinstance(out, fx.Node)))

        def loss(*values: Tensor) -> tuple[Tensor]:
            by_node = dict(zip(reads, values, strict=True))
            flat = [by_node[out] if isinstance(out, fx.Node) else out for out in outputs]
            return (self(captured.unflatten_output(flat)),)

        return LayerRun(
            name="the loss",
            function=loss,
            reads=reads,
            writes=[None],
            needs_grad=[True] * len(reads),
            changed=[False] * len(reads),
            parameters=[],
        )
