"""Stepping in where Python calls torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """Inside, every function of torch goes through `call`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What to do instead of the function, or with it."""
        raise NotImplementedError
