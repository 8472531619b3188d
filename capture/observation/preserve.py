"""Preservation of a model's state, and of the random generators, across trial runs."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..program.program import storage_key
from .python_state import (
    TABLES,
    find_iterators,
    find_python_state,
    get_generator_state,
    is_array,
    is_plain_object,
    read_slots,
    restore_generator,
    restore_slots,
)

Restore = Callable[[], None]


@contextmanager
def preserve_model(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore modes, buffers, attributes, hooks, gradients and random state on exit.

    Buffers are restored both as objects and by value: a forward may change one in place, or
    replace it. The same holds for other Python state: containers, plain objects, tensors, arrays
    and random generators. Iterators are replaced by unused copies.

    Args:
        model: The model; its parameters must not be changed in place inside.
        training: Mode of the whole model inside; `None` keeps each module's own.
    """
    # An ExitStack restores each kind of state even if restoring another raises. Callbacks run in
    # reverse: attributes come first, so that the values are put back into the original objects.
    with ExitStack() as restoring:
        restoring.enter_context(preserve_random_state())
        for kind in (
            _iterators,
            _gradients,
            _parameter_memory,
            _buffer_values,
            _tensors,
            _generators,
            _containers,
            _attributes,
        ):
            restoring.callback(kind(model))
        if training is not None:
            model.train(training)
        yield


def _attributes(model: nn.Module) -> Restore:
    """Save every module's attributes, including its mode, and the contents of its tables."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    tables = [
        (getattr(module, name), type(getattr(module, name))(getattr(module, name)))
        for module in model.modules()
        for name in TABLES
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
    """Save the elements of containers and the attributes of plain objects, by identity."""
    kept = find_python_state(model)
    objects = [value for value in kept if is_plain_object(value)]
    attributes = [vars(value) for value in objects if hasattr(value, "__dict__")]
    found = [
        (container, _entries(container))
        for container in (*kept, *attributes)
        if isinstance(container, list | dict | set | deque)
    ]
    slotted = [(value, read_slots(value)) for value in objects]

    def restore() -> None:
        for value, slots in slotted:
            restore_slots(value, slots)
        for container, held in found:
            # Refill only what changed: clearing would invalidate iterators and views on it.
            now = _entries(container)
            if len(now) != len(held) or any(
                a is not b
                for ours, theirs in zip(now, held, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            ):
                _refill(container, held)

    return restore


def _entries(container: Any) -> list[tuple[Any, ...]]:
    """Return a dict's items, or the elements of any other container as 1-tuples."""
    if isinstance(container, dict):
        return list(container.items())
    return [(element,) for element in container]


def _refill(container: Any, held: list[tuple[Any, ...]]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(held)
    elif isinstance(container, set):
        container.update(element for (element,) in held)
    else:
        container.extend(element for (element,) in held)


def _generators(model: nn.Module) -> Restore:
    found = [(value, get_generator_state(value)) for value in find_python_state(model)]

    def restore() -> None:
        for value, state in found:
            if state is not None:
                restore_generator(value, state)

    return restore


def _tensors(model: nn.Module) -> Restore:
    """Save the values of tensors and arrays that are neither parameters nor buffers."""
    kept = find_python_state(model)
    tensors = [(value, value.detach().clone()) for value in kept if _is_ordinary(value)]
    arrays = [(value, value.copy()) for value in kept if is_array(value)]

    def restore() -> None:
        for tensor, values in tensors:
            if tensor.shape != values.shape or not torch.equal(tensor.detach(), values):
                tensor.data.copy_(values)
        for array, values in arrays:
            if array.tobytes() != values.tobytes():
                array[...] = values

    return restore


def _is_ordinary(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_inference()
    )


def _iterators(model: nn.Module) -> Restore:
    found = []
    copies: dict[int, Any] = {}
    for module in model.modules():
        for _, value, put in find_iterators(module):
            unused = copies.setdefault(id(value), copied(value))
            if put is not None and unused is not None:
                found.append((put, unused))

    def restore() -> None:
        for put, unused in found:
            put(unused)

    return restore


def copied(iterator: Iterator[Any]) -> Iterator[Any] | None:
    """Copy an iterator at its current position; return `None` if it cannot be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return copy.deepcopy(iterator)
        except Exception:  # noqa: BLE001 - whatever it holds may refuse in its own way
            return None


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
    """Save which memory parameters use, and which of them require a gradient."""
    # detach() shares the memory: the values are not copied, only the storage is remembered.
    found = [(p, p.detach(), p.requires_grad) for p in model.parameters()]

    def restore() -> None:
        for parameter, same_memory, required in found:
            if storage_key(parameter) != storage_key(same_memory):
                parameter.data = same_memory
            parameter.requires_grad = required

    return restore


def _gradients(model: nn.Module) -> Restore:
    found = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore() -> None:
        for parameter, gradient in found:
            parameter.grad = gradient

    return restore


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the generators of torch, CUDA, Python, and numpy if it is loaded, on exit."""
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


def get_random_state() -> tuple[Any, ...]:
    """Return the generators' states, except CUDA's, in a form that can be compared."""
    numpy = sys.modules.get("numpy")
    torch_state = torch.get_rng_state().numpy().tobytes()
    if numpy is None:
        return torch_state, random.getstate()
    name, keys, *rest = numpy.random.get_state()
    return torch_state, random.getstate(), name, keys.tobytes(), *rest


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Restore every submodule's mode on exit."""
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
