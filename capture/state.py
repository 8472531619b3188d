"""Leave a model and the random generators exactly as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Restore = Callable[[], None]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where ``nn.Module`` keeps its hooks."""


@contextmanager
def preserved(
    model: nn.Module, *, training: bool | None = None, parameters: bool = False
) -> Iterator[None]:
    """Restore modes, hooks, buffers, gradients and random state on the way out, whatever happens.

    Buffers are restored as objects and as values: a forward may change one in place, or put
    another in its place. Each kind of state is restored even where restoring another fails.

    Args:
        model: The model.
        training: Mode to put the whole model in meanwhile; `None` leaves each module's own.
        parameters: Restore the parameters' values too, for models whose forward changes its own
            weights (``nn.Embedding(max_norm=1)``); takes as much host memory as they take. Without
            it nothing inside may change them.
    """
    with ExitStack() as restoring:
        for found in (_modes, _hooks, _requires_grad, _buffers, _gradients):
            restoring.callback(found(model))
        if parameters:
            restoring.callback(_parameters(model))
        restoring.callback(_random_state())
        if training is not None:
            model.train(training)
        yield


def _modes(model: nn.Module) -> Restore:
    found = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, mode in found:
            module.training = mode

    return restore


def _hooks(model: nn.Module) -> Restore:
    found = [
        (hooks, list(hooks.items()))
        for module in model.modules()
        for hooks in (getattr(module, name) for name in HOOKS)
    ]

    def restore() -> None:
        for hooks, items in found:
            if list(hooks.items()) != items:
                hooks.clear()
                hooks.update(items)

    return restore


def _requires_grad(model: nn.Module) -> Restore:
    found = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, required in found:
            parameter.requires_grad = required

    return restore


def _buffers(model: nn.Module) -> Restore:
    found = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]

    def restore() -> None:
        for module, name, buffer, value in found:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)

    return restore


def _gradients(model: nn.Module) -> Restore:
    found = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, gradient in found:
            parameter.grad = gradient

    return restore


def _parameters(model: nn.Module) -> Restore:
    """Through ``data``: an unchanged parameter is not marked as changed for autograd."""
    found = [(parameter, _host_copy(parameter)) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, value in found:
            parameter.data.copy_(value)

    return restore


def _host_copy(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.cpu() if value.device.type == "cuda" else value.clone()


def _random_state() -> Restore:
    """Of Python, torch, CUDA, and numpy where it is loaded."""
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy_random: Any = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if numpy_random:
            numpy_random.set_state(numpy_state)

    return restore
