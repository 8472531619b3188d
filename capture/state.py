"""Leave a model and the random generators exactly as they were found."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .program import storage_key

Restore = Callable[[], None]

_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_CONTAINERS = (list, dict, set)


@contextmanager
def preserved(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore modes, buffers, attributes, hooks, gradients and random state, whatever happens.

    Buffers are restored as objects and as values: a forward may change one in place, or put
    another in its place. So are lists, dicts and sets that modules hold, one level deep. Each kind
    of state is restored even where restoring another fails.

    Args:
        model: The model; parameters must not be changed in place inside.
        training: Mode to put the whole model in meanwhile; `None` leaves each module's own.
    """
    with ExitStack() as restoring:
        restoring.enter_context(random_state_kept())
        for kind in (_gradients, _parameter_memory, _buffer_values, _containers, _attributes):
            restoring.callback(kind(model))
        if training is not None:
            model.train(training)
        yield


def _attributes(model: nn.Module) -> Restore:
    """Attributes of every module, its mode among them, and its tables as the objects they are."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    tables = [
        (getattr(module, name), type(getattr(module, name))(getattr(module, name)))
        for module in model.modules()
        for name in _TABLES
    ]

    def restore() -> None:
        for module, held in attributes:
            vars(module).clear()
            vars(module).update(held)
        for table, entries in tables:
            table.clear()
            table.update(entries)

    return restore


def _containers(model: nn.Module) -> Restore:
    found = [
        (value, value.copy())
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) in _CONTAINERS and name not in _TABLES
    ]

    def restore() -> None:
        for container, held in found:
            _refill(container, held)

    return restore


def _refill(container: Any, held: Any) -> None:
    """Give a list, dict or set its old elements, where it has others now."""
    container.clear()
    if isinstance(container, list):
        container.extend(held)
    else:
        container.update(held)


def _buffer_values(model: nn.Module) -> Restore:
    found = [
        (buffer, buffer.detach().clone())
        for module in model.modules()
        for buffer in module._buffers.values()
        if buffer is not None
    ]

    def restore() -> None:
        for buffer, value in found:
            buffer.data.copy_(value)

    return restore


def _parameter_memory(model: nn.Module) -> Restore:
    """Where parameters lie, and which of them are trained."""
    found = [(p, p.detach(), p.requires_grad) for p in model.parameters()]

    def restore() -> None:
        for parameter, same_memory, required in found:
            if storage_key(parameter) != storage_key(same_memory):
                parameter.data = same_memory
            parameter.requires_grad = required

    return restore


def _gradients(model: nn.Module) -> Restore:
    """As objects; where there was none there is none again."""
    found = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, gradient in found:
            parameter.grad = gradient

    return restore


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the generators of torch, CUDA, Python, and numpy where it is loaded."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


def random_state() -> tuple[Any, ...]:
    """The generators' states as values that can be compared; those of CUDA apart."""
    numpy = sys.modules.get("numpy")
    torch_state = torch.get_rng_state().numpy().tobytes()
    if numpy is None:
        return torch_state, random.getstate()
    name, keys, *rest = numpy.random.get_state()
    return torch_state, random.getstate(), name, keys.tobytes(), *rest


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore every submodule's mode."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed)


def plain_attributes(model: nn.Module) -> dict[int, dict[str, Any]]:
    """Attributes of every module that are no parameters, buffers, modules or hooks, by its id."""
    return {
        id(module): {
            name: value
            for name, value in vars(module).items()
            if name not in _TABLES and name != "training"
        }
        for module in model.modules()
    }
