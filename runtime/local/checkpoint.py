"""Keep a stage's inputs instead of what it computed, and compute that again in the backward.

Two nodes of the graph do it, in the order the backward meets them::

    Recompute    runs the stage's forward again, while the gradient may still be on its way
    (the stage waits for the gradient to be copied here; see `travel`)
    Checkpoint   runs the backward of what was just computed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from .dependency import first_differentiable
from .rerun_tomerge import Rerun

Values = tuple[Any, ...]


class Checkpoint(torch.autograd.Function):
    """The stage without its graph; the backward is `Rerun.backward`'s."""

    @staticmethod
    def forward(ctx: FunctionCtx, rerun: Rerun, token: Tensor, *inputs: Any) -> Values:
        ctx.set_materialize_grads(False)
        ctx.rerun = rerun  # type: ignore[attr-defined]
        ctx.others = {  # type: ignore[attr-defined]
            i: value for i, value in enumerate(inputs) if not isinstance(value, Tensor)
        }
        outputs = rerun.first(inputs)
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, Tensor)))
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return None, None, *_rerun_of(ctx).backward(_inputs_of(ctx), gradients)


class Recompute(torch.autograd.Function):
    """An identity; its backward runs the stage's forward again."""

    @staticmethod
    def forward(ctx: FunctionCtx, node: FunctionCtx, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node = node  # type: ignore[attr-defined]
        return value.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        node = ctx.node  # type: ignore[attr-defined]
        _rerun_of(node).again(_inputs_of(node))
        return None, gradients[0]


def _rerun_of(node: FunctionCtx) -> Rerun:
    rerun: Rerun = node.rerun  # type: ignore[attr-defined]
    return rerun


def _inputs_of(node: FunctionCtx) -> Values:
    """Of a `Checkpoint`, tensors from where autograd keeps them until the backward is over."""
    saved: Values = node.saved_tensors  # type: ignore[attr-defined]
    others: dict[int, Any] = node.others  # type: ignore[attr-defined]
    tensors = iter(saved)
    return tuple(
        others[i] if i in others else next(tensors) for i in range(len(saved) + len(others))
    )


def checkpoint(
    function: Callable[[Values], Values], module: nn.Module, inputs: Values, token: Tensor | None
) -> tuple[Values, Any]:
    """Run a stage so that its inputs are all that is kept for the backward.

    Args:
        function: From its inputs to its outputs.
        module: The stage's module.
        inputs: Tensors and other values.
        token: See `order.fork`; the outputs depend on it.

    Returns:
        The outputs, and the node to hand to `recompute_before`; `None` if no output has a gradient.
    """
    if token is None:  # something has to have a gradient, or parameters would get none
        token = torch.empty(0, requires_grad=True)
    outputs: Values = Checkpoint.apply(Rerun(function, module), token, *inputs)  # type: ignore[no-untyped-call]
    index = first_differentiable(outputs)
    return outputs, None if index is None else outputs[index].grad_fn


def recompute_before(values: Values, node: Any) -> Values:
    """Have the second run begin when a gradient for these values is known."""
    index = first_differentiable(values)
    if node is None or index is None:
        return values
    value = Recompute.apply(node, values[index])  # type: ignore[no-untyped-call]
    return (*values[:index], value, *values[index + 1 :])
