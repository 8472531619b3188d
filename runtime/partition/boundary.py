"""Identities at a stage's edges that make activations and gradients safe to send.

Point-to-point transports need contiguous memory, for gradients too, which only an autograd function
can enforce. And a stage that works in place must do so on its own copy of what it received.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, copy: bool) -> Tensor:
        # Without a gradient None passes, not zeros, by which weights in front would decay.
        ctx.set_materialize_grads(False)
        return value.clone() if copy else value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return _make_contiguous(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.view_as(value) if value.is_contiguous() else value.contiguous()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return _make_contiguous(gradients[0])


def _make_contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def enter(value: Any) -> Any:
    """Pass on a received tensor that the stage does not change."""
    return _Enter.apply(value, False) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]


def enter_copy(value: Any) -> Any:
    """Copy a received tensor for a stage that works in place."""
    return _Enter.apply(value, True) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]


def leave(value: Any) -> Any:
    """Make a tensor that the stage sends contiguous."""
    return _Leave.apply(value) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]
