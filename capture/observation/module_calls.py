"""Interception of every module call while the model runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class ModuleCall:
    """A call in progress.

    Attributes:
        module: The module called.
        path: The first of its names in the model.
        at_base: Whether ``nn.Module.__call__`` was reached; classes may put code around it.
    """

    module: nn.Module
    path: str
    at_base: bool = False


Observer = Callable[[ModuleCall, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes the call, a function that performs it, and its arguments; returns the call's value."""


@contextmanager
def watch_calls(model: nn.Module, observer: Observer) -> Iterator[list[ModuleCall]]:
    """Pass every module call through ``observer``; yield the stack of calls in progress."""
    # `__call__` is replaced on nn.Module and on every class of the model that overrides it, since
    # Python looks special methods up on the class. The modules themselves are not changed.
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        paths.setdefault(id(module), path)
    stack: list[ModuleCall] = []

    def wrapped(owner: type, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            base = owner is nn.Module
            # A subclass's __call__ that calls super().__call__ arrives here twice: one call.
            if id(module) not in paths:
                return original(module, *args, **kwargs)
            if stack and stack[-1].module is module and not stack[-1].at_base:
                stack[-1].at_base = base
                return original(module, *args, **kwargs)
            frame = ModuleCall(module, paths[id(module)], base)
            stack.append(frame)
            try:
                return observer(frame, lambda: original(module, *args, **kwargs), args, kwargs)
            finally:
                stack.remove(frame)

        return call

    owners = {
        owner
        for module in model.modules()
        for owner in type(module).__mro__
        if "__call__" in vars(owner) and issubclass(owner, nn.Module)
    } | {nn.Module}
    originals = {owner: vars(owner)["__call__"] for owner in owners}
    try:
        for owner, original in originals.items():
            owner.__call__ = wrapped(owner, original)  # type: ignore[method-assign]
        yield stack
    finally:
        for owner, original in originals.items():
            owner.__call__ = original  # type: ignore[method-assign]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
