"""Every message gets its gradient, because distributed autograd waits for all of them.

Its algorithm ("fast mode" in torch's documentation) counts on a gradient for each tensor message
sent in a context. If one never comes, the backward pass waits until it times out: a weight lent to
a stage that takes no gradient of it is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, *anchored: Tensor) -> Tensor:
        ctx.others = len(anchored)  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        return gradients[0], *[None] * ctx.others  # type: ignore[attr-defined]


def anchor(value: Tensor, received: Iterable[Any]) -> Tensor:
    """The value; its backward reaches everything received, with no gradient where there is none."""
    needed = [item for item in received if isinstance(item, Tensor) and item.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return value
    anchored: Tensor = _Anchor.apply(value, *needed)  # type: ignore[no-untyped-call]
    return anchored


def anchor_one(values: Sequence[Any], received: Iterable[Any]) -> tuple[Any, ...]:
    """The values, the first that can have a gradient anchored: one a message is enough."""
    anchored = list(values)
    for index, value in enumerate(anchored):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            anchored[index] = anchor(value, received)
            break
    return tuple(anchored)
