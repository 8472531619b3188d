"""Detection of tensor hooks and of gradients taken inside a forward, which tracers lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def watch_gradients(seen: Callable[[str], None]) -> Iterator[None]:
    """Call ``seen`` with a description at every such hook or gradient."""
    # Every gradient, also torch.autograd.grad and Tensor.backward, passes _engine_run_backward.
    hook: Any = Tensor.register_hook
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def register_hook(tensor: Tensor, function: Any) -> Any:
        seen("hooks a tensor's gradient")
        return hook(tensor, function)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        seen("takes a gradient inside its forward")
        return run(*args, **kwargs)

    try:
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
        yield
    finally:
        Tensor.register_hook = hook  # type: ignore[method-assign]
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
