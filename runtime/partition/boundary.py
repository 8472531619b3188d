"""The operations at a stage's edges: identities that make both directions safe to send.

Point-to-point transports want contiguous memory, in gradients too; and a stage that works in
place must work on its own copy of what it received.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, copy: bool) -> Tensor:
        return value.clone() if copy else value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        return gradients[0].contiguous(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor) -> Tensor:
        return value.view_as(value) if value.is_contiguous() else value.contiguous()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        return gradients[0].contiguous()


def enter(value: Any) -> Any:
    """What a stage does first with a received tensor it does not change."""
    return _Enter.apply(value, False) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]


def enter_copy(value: Any) -> Any:
    """What a stage that works in place does first: take its own copy."""
    return _Enter.apply(value, True) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]


def leave(value: Any) -> Any:
    """What a stage does last with a tensor it sends."""
    return _Leave.apply(value) if isinstance(value, Tensor) else value  # type: ignore[no-untyped-call]
