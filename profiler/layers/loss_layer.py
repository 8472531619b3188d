"""The loss as one more layer behind the model, and a check that outputs and loss are finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...capture.captured import Captured
from ...capture.program.program import tensors_of
from ...core.errors import InvalidInput
from ...core.units import name_type
from .error_attribution import blamed
from .layer_run import LayerRun, Values
from .precision import Context

LossFunction = Callable[[Any, Tensor], Tensor]


class Loss:
    """``loss_fn(output, target)`` with its target."""

    def __init__(self, loss_fn: LossFunction, target: Tensor | None, device: torch.device) -> None:
        if target is None:
            raise InvalidInput("a loss needs a target; give target=")
        if not isinstance(target, Tensor):
            raise InvalidInput(f"a target is a tensor; found {name_type(target)}")
        self._loss_fn, self._target = loss_fn, target.to(device)

    def __call__(self, output: Any) -> Tensor:
        """Compute the loss of the model's output in its own structure."""
        loss = self._loss_fn(output, self._target)
        if not isinstance(loss, Tensor):
            raise InvalidInput(
                f"the loss function returned {name_type(loss)}; return the loss alone, as a "
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


ADVICE = (
    "check the sample, the weights and the precision; a layer whose work depends on values may "
    "take another time in training"
)


def notes_on_numbers(
    captured: Captured, values: Values, losses: Sequence[LayerRun], context: Context
) -> tuple[str, ...]:
    """Return notes if the output holds NaN, or the loss is NaN or infinite."""
    outputs = [node for node in captured.program.flat_outputs if isinstance(node, fx.Node)]
    tensors = tensors_of([values[node] for node in outputs if node in values])
    if any(_holds_nan(tensor) for tensor in tensors):
        return (f"the model's output on this sample holds NaN; {ADVICE}",)
    for run in losses:
        with blamed(run), torch.no_grad(), context():
            (loss,) = run.function(*run.arguments(run.leaves(values)))
        if not torch.isfinite(loss).all():
            return (f"the loss of this sample is {loss.item()}; {ADVICE}",)
    return ()


def _holds_nan(tensor: Tensor) -> bool:
    """Return whether a tensor holds NaN, by its minimum, which needs no extra memory."""
    ordered = tensor.is_floating_point() and tensor.layout is torch.strided
    return ordered and tensor.numel() > 0 and bool(tensor.detach().amin().isnan())
