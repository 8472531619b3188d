"""Hooks of weights that do not keep alive those who placed them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor


def call_when_accumulated(weight: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call a method whenever autograd has added to a weight's gradient, while its object lives.

    A weight holds its hooks where the garbage collector does not look. One that holds its object,
    which holds the weight, would be kept for ever, with process groups and all.
    """
    reference = weakref.WeakMethod(method)

    def accumulated(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    weight.register_post_accumulate_grad_hook(accumulated)
