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

Later = Callable[..., Any]
"""Takes a function that restores something on exit, and its arguments."""


@contextmanager
def preserve_model(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Restore modes, buffers, attributes, hooks, gradients and random state on exit.

    Buffers are restored both as objects and by value: a forward may change one in place, or
    replace it. The same holds for other Python state: containers, plain objects, tensors, arrays
    and random generators. Iterators are replaced by unused copies. Parameters must not be changed
    in place inside. ``training`` sets the mode of the whole model; `None` keeps each module's own.
    """
    # An ExitStack restores each value even if restoring another raises. Callbacks run in reverse:
    # attributes come first, so that the values are put back into the original objects.
    with ExitStack() as restoring:
        restoring.enter_context(preserve_random_state())
        later, state = restoring.callback, find_python_state(model)
        _save_iterators(model, later)
        for parameter in model.parameters():
            later(setattr, parameter, "grad", parameter.grad)
            # detach() shares the memory: the values are not copied, only the storage is remembered.
            later(_restore_memory, parameter, parameter.detach(), parameter.requires_grad)
        for buffer in (each for module in model.modules() for each in module._buffers.values()):
            if buffer is not None:
                later(_restore_buffer, buffer, buffer.detach().clone())
        for value in state:
            if _is_ordinary(value):
                later(_restore_tensor, value, value.detach().clone())
            elif is_array(value):
                later(_restore_array, value, value.copy())
            elif isinstance(value, bytearray):
                later(value.__setitem__, slice(None), bytes(value))
            elif (generator := get_generator_state(value)) is not None:
                later(restore_generator, value, generator)
        _save_containers(state, later)
        _save_attributes(model, later)
        if training is not None:
            model.train(training)
        yield


def _save_attributes(model: nn.Module, later: Later) -> None:
    """Save every module's attributes, including its mode, and the contents of its tables."""
    # The attributes of a ScriptModule are held by TorchScript, out of Python's reach.
    modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
    for module in modules:
        for name in TABLES:
            table = getattr(module, name)
            later(_restore_container, table, _entries(table))
    for module in modules:
        later(_restore_container, vars(module), _entries(vars(module)))


def _save_containers(state: list[Any], later: Later) -> None:
    """Save the elements of containers and the attributes of plain objects, by identity."""
    objects = [value for value in state if is_plain_object(value)]
    attributes = [vars(value) for value in objects if hasattr(value, "__dict__")]
    for container in (*state, *attributes):
        if isinstance(container, list | dict | set | deque):
            later(_restore_container, container, _entries(container))
    for value in objects:
        later(restore_slots, value, read_slots(value))


def _restore_container(container: Any, held: list[tuple[Any, ...]]) -> None:
    # Refill only what changed: clearing would invalidate iterators and views on it.
    now = _entries(container)
    pairs = zip(now, held, strict=False)
    if len(now) == len(held) and all(
        ours is theirs for pair in pairs for ours, theirs in zip(*pair, strict=True)
    ):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(held)
    elif isinstance(container, set):
        container.update(element for (element,) in held)
    else:
        container.extend(element for (element,) in held)


def _entries(container: Any) -> list[tuple[Any, ...]]:
    """Return a dict's items, or the elements of any other container as 1-tuples."""
    if isinstance(container, dict):
        return list(container.items())
    return [(element,) for element in container]


def _is_ordinary(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_inference()
    )


def _restore_tensor(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.shape != values.shape or not torch.equal(tensor.detach(), values):
        tensor.data.copy_(values)


def _restore_array(array: Any, values: Any) -> None:
    if array.tobytes() != values.tobytes():
        array[...] = values


def _restore_buffer(buffer: torch.Tensor, values: torch.Tensor) -> None:
    buffer.data.copy_(values)


def _restore_memory(parameter: nn.Parameter, same_memory: torch.Tensor, required: bool) -> None:
    if storage_key(parameter) != storage_key(same_memory):
        parameter.data = same_memory
    parameter.requires_grad = required


def _save_iterators(model: nn.Module, later: Later) -> None:
    copies: dict[int, Any] = {}
    for module in model.modules():
        for _, value, put in find_iterators(module):
            unused = copies.setdefault(id(value), copied(value))
            if put is not None and unused is not None:
                later(put, unused)


def copied(iterator: Iterator[Any]) -> Iterator[Any] | None:
    """Copy an iterator at its current position; return `None` if it cannot be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return copy.deepcopy(iterator)
        except Exception:  # noqa: BLE001 - whatever it holds may refuse in its own way
            return None


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters, their gradients' hooks, and buffers; ties stay tied."""
    # With gradients on, the copied parameters of a ScriptModule would be results of an operation,
    # whose .grad stays empty.
    with torch.no_grad():
        # Tensors that an earlier forward left in attributes have a graph, which deepcopy refuses.
        left = [t for t in find_python_state(module) if isinstance(t, torch.Tensor)]
        made = copy.deepcopy(module, {id(t): t.detach().clone() for t in left if not t.is_leaf})
    for original, copy_of in zip(module.parameters(), made.parameters(), strict=True):
        copy_of.requires_grad_(original.requires_grad)
        # deepcopy leaves them out: hooks that change a weight's gradient, such as masks.
        if original.requires_grad:
            for hook in (original._backward_hooks or {}).values():
                copy_of.register_hook(hook)
    return made


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the generators of torch, CUDA, Python, and numpy if it is loaded, on exit."""
    with ExitStack() as restoring:
        restoring.callback(save_random_state())
        yield


def save_random_state() -> Callable[[], None]:
    """Return a function that puts these generators back to where they are now."""
    python_state = random.getstate()
    numpy_state = get_numpy_state()
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        random.setstate(python_state)
        set_numpy_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    return restore


def get_random_state() -> tuple[Any, ...]:
    """Return the generators' states, except CUDA's, in a form that can be compared."""
    return torch.get_rng_state().numpy().tobytes(), *get_untraced_random_state()


def get_untraced_random_state() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators, whose numbers no tracer records."""
    return random.getstate(), get_numpy_state()


def get_numpy_state() -> tuple[Any, ...] | None:
    """Return the state of numpy's generator in a form that can be compared.

    `None` if numpy is not loaded: it is not imported for this.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, *rest = numpy.random.get_state()
    return kind, keys.tobytes(), *rest


def set_numpy_state(state: tuple[Any, ...] | None) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and state is not None:
        kind, keys, *rest = state
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed)
