"""Dependencies that order the backwards of a stage's micro-batches.

Without them, autograd may start the backward of one micro-batch before that of another has ended,
and the recomputed activations of both are in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Fork(torch.autograd.Function):
    """Identity with a second, empty output; its backward waits for the gradients of both."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return value.detach(), value.new_empty(0)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Tensor | None:
        return gradients[0]


class _Join(torch.autograd.Function):
    """Identity with a second, ignored input, whose backward waits for this one."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, token: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        return gradients[0], None


def fork(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor | None]:
    """Tie a token to the first value that has a gradient.

    Returns:
        The values, and the token: backward passes values joined to it before these values.
        `None` if no value requires a gradient.
    """
    index = first_differentiable(values)
    if index is None:
        return values, None
    value, token = _Fork.apply(values[index])  # type: ignore[no-untyped-call]
    return (*values[:index], value, *values[index + 1 :]), token


def join(values: tuple[Any, ...], token: Tensor) -> tuple[Any, ...] | None:
    """Tie the first value that has a gradient to a token.

    Returns:
        The values; `None` if none requires a gradient. Tying another value would make the first
        layer compute an unneeded gradient.
    """
    index = first_differentiable(values)
    if index is None:
        return None
    value = _Join.apply(values[index], token)  # type: ignore[no-untyped-call]
    return (*values[:index], value, *values[index + 1 :])


def first_differentiable(values: tuple[Any, ...]) -> int | None:
    """Return the index of the first tensor that a gradient will reach, if any."""
    if not torch.is_grad_enabled():
        return None
    return next(
        (i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad),
        None,
    )
