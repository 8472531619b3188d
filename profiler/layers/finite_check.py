"""Check that outputs and loss on the sample are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...capture.captured import Captured
from ...capture.program.program import tensors_of
from .error_attribution import blamed
from .layer_run import LayerRun, Values
from .precision import Context

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
