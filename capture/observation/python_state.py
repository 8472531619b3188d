"""Python state of modules: finding it and describing its contents, so that changes show.

Contents that change from one forward to the next are state that a traced graph would lose.
"""

from __future__ import annotations

import io
import operator
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..call_form import SAMPLE_CONSTANTS
from ..program.program import storage_key
from .interception import HOOKS

Contents = Mapping[Any, Any]
"""A value described by its parts: constants, lengths, identities, or the contents of its parts."""

Replace = Callable[[Any], None]
"""Puts another value in the place where a value was found."""

ChangeKind = Literal["drawn", "state", "growth", "object"]
"""A random generator was used; a value changed; something was added or removed; an object was
replaced by another."""

MAX_DEPTH = 4
"""Deepest nesting of containers that is inspected."""

TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
STATE_CONSTANTS = (*SAMPLE_CONSTANTS, complex, bytes)
"""Types of values that are equal if their ``repr`` is."""

OPAQUE_PACKAGES = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose objects and classes are not inspected."""


class ConstantValue(tuple[Any, ...]):
    """A constant, or the values of an array."""


NOTHING = ConstantValue((type(None), repr(None)))


class GeneratorState(ConstantValue):
    """The state of a random generator."""


class ContainerLength(tuple[int]):
    """The length of a container."""


class ObjectIdentity:
    """The identity of an object; for a tensor, together with its version counter."""

    __slots__ = ("_value", "_version")

    def __init__(self, value: Any) -> None:
        self._value = value
        written = isinstance(value, Tensor) and not value.is_inference()
        self._version = value._version if written else 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ObjectIdentity)
            and self._value is other._value
            and self._version == other._version
        )

    __hash__ = None  # type: ignore[assignment]


def get_python_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes except parameters, buffers, submodules, hooks and the mode."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in TABLES and name != "training"
    }


def read_contents(module: nn.Module) -> Contents:
    """Describe the contents of a module's Python state, and which parameters are trainable."""
    trained = {
        f"{name}.requires_grad": ConstantValue((parameter.requires_grad,))
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    attributes = get_python_attributes(module).items()
    return {**trained, **{name: read_content(value) for name, value in attributes}}


def classify_change(was: Any, now: Any) -> ChangeKind:
    """Classify the change from one description to another, unequal one."""
    if was == NOTHING:  # None to a value: lazy initialisation, such as `config.problem_type`
        return "growth"
    if isinstance(was, ConstantValue) and isinstance(now, ConstantValue):
        return (
            "drawn"
            if isinstance(was, GeneratorState) and isinstance(now, GeneratorState)
            else "state"
        )
    if isinstance(was, dict) and isinstance(now, dict):
        kinds = {
            classify_change(was.get(key), now.get(key))
            for key in was.keys() | now.keys()
            if was.get(key) != now.get(key)
        }
        # The kind with the most serious consequence decides for the container.
        order: tuple[ChangeKind, ...] = ("drawn", "state", "growth")
        return next((kind for kind in order if kind in kinds), "object")
    either = (ConstantValue, ContainerLength)
    return "growth" if isinstance(was, either) or isinstance(now, either) else "object"


def read_content(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Describe a value by its contents, so that another description shows what changed."""
    if isinstance(value, STATE_CONSTANTS):
        return ConstantValue((type(value), repr(value)))
    state = get_generator_state(value)
    if state is not None:
        return GeneratorState((repr(state),))
    if is_array(value):
        return ConstantValue((value.dtype.str, value.shape, value.tobytes()))
    if depth and isinstance(value, CONTAINERS):
        parts = {key: read_content(part, depth - 1) for key, part in _parts(value)}
        return {"length": ContainerLength((len(value),)), **parts}
    if isinstance(value, bytearray):
        return ConstantValue((bytearray, bytes(value)))
    if depth and isinstance(value, ContextVar):
        with suppress(LookupError):  # neither set nor with a default
            return {"value": read_content(value.get(), depth - 1)}
    if depth and (held := _held_by(value)):
        parts = {name: read_content(part, depth - 1) for name, part in held.items()}
        return {"object": ObjectIdentity(value), **parts}
    return ObjectIdentity(value)


def _held_by(value: Any) -> Mapping[str, Any]:
    """Return the attributes of a plain object, or the variables of a function's closure."""
    if is_plain_object(value):
        return read_attributes(value)
    if isinstance(value, threading.local):  # those of this thread
        return vars(value)
    return read_closure(value) if isinstance(value, types.FunctionType) else {}


def read_closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of a function's closure; those not assigned yet are left out."""
    return {
        name: cell.cell_contents
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
        if cell != types.CellType()
    }


# Keys and elements that are no constants are identified by id: hashing or comparing them could run
# the author's code.
def _parts(container: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, dict):
        for key, part in container.items():
            yield ("key", key if isinstance(key, STATE_CONSTANTS) else id(key)), part
    elif isinstance(container, set | frozenset):
        for part in container:
            yield ("element", part if isinstance(part, STATE_CONSTANTS) else id(part)), part
    else:
        for index, part in enumerate(container):
            yield ("item", index), part


def get_generator_state(value: Any) -> Any:
    """Return the state of a random generator of Python, numpy or torch; else `None`."""
    # SystemRandom has no state, and its getstate raises.
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return _bits(value).state
    return None


def restore_generator(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Generator):
        value.set_state(torch.tensor(state, dtype=torch.uint8))
    else:
        _bits(value).state = state


def _bits(value: Any) -> Any:
    return getattr(value, "bit_generator", None) or value._bit_generator


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_iterator(value: Any) -> bool:
    """Return True for an iterator whose position cannot be inspected, such as a generator."""
    return (
        isinstance(value, Iterator)
        and not isinstance(value, io.IOBase)
        and not hasattr(value, "__dict__")
    )


def find_iterators(module: nn.Module) -> Iterator[tuple[str, Any, Replace | None]]:
    """Find iterators in a module's attributes and in containers there, but not inside objects.

    Yields the attribute, the iterator, and a function that replaces it: `None` if it is in an
    immutable container.
    """

    def search(value: Any, put: Replace | None, depth: int) -> Iterator[tuple[Any, Replace | None]]:
        if is_iterator(value):
            yield value, put
        elif depth and isinstance(value, CONTAINERS):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            changeable = isinstance(value, list | dict | deque)
            for key, part in list(items):
                inside = partial(operator.setitem, value, key) if changeable else None
                yield from search(part, inside, depth - 1)

    for name, value in get_python_attributes(module).items():
        own = partial(operator.setitem, vars(module), name)
        for iterator, put in search(value, own, MAX_DEPTH):
            yield name, iterator, put


def is_plain_object(value: Any) -> bool:
    """Return True for an instance of a user-defined class with inspectable attributes."""
    if isinstance(value, types.SimpleNamespace):
        return True
    kinds = (nn.Module, Tensor, type, types.FunctionType, types.ModuleType, Enum)
    package = type(value).__module__.partition(".")[0]
    return (
        package not in OPAQUE_PACKAGES
        and not isinstance(value, kinds)
        and (hasattr(value, "__dict__") or next(_slots_of(type(value)), None) is not None)
    )


def _slots_of(kind: type) -> Iterator[types.MemberDescriptorType]:
    for each in kind.__mro__:
        if "__slots__" in vars(each):
            for slot in vars(each).values():
                if isinstance(slot, types.MemberDescriptorType):
                    yield slot


def read_slots(value: Any) -> dict[types.MemberDescriptorType, Any]:
    """Return the contents of an object's ``__slots__``, except those never assigned."""
    found = {}
    for slot in _slots_of(type(value)):
        with suppress(AttributeError):
            found[slot] = slot.__get__(value, type(value))
    return found


def restore_slots(value: Any, held: Mapping[types.MemberDescriptorType, Any]) -> None:
    """Restore slots as returned by `read_slots`, deleting any others."""
    now = read_slots(value)
    for slot in now.keys() - held.keys():
        slot.__delete__(value)
    for slot, content in held.items():
        if slot not in now or now[slot] is not content:
            slot.__set__(value, content)


def read_attributes(value: Any) -> dict[str, Any]:
    """Return all attributes of a plain object, by name."""
    slots = {slot.__name__: content for slot, content in read_slots(value).items()}
    return {**slots, **getattr(value, "__dict__", {})}


def find_tensors(value: Any, depth: int = MAX_DEPTH) -> list[Tensor]:
    """Find the tensors that a value is or holds, in containers and plain objects."""
    if isinstance(value, Tensor):
        return [value]
    inner = _inner_values(value) if depth else []
    return [tensor for part in inner for tensor in find_tensors(part, depth - 1)]


def _inner_values(value: Any) -> list[Any]:
    """Return the elements of a container, or the attributes of a plain object."""
    if isinstance(value, CONTAINERS):
        return [part for _, part in _parts(value)]
    return list(read_attributes(value).values()) if is_plain_object(value) else []


def reaches_storage(value: Any, key: int, depth: int = MAX_DEPTH) -> bool:
    """Return True if a value is or holds a tensor of a storage, also in modules and closures."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and storage_key(value) == key
    if not depth:
        return False
    return any(reaches_storage(part, key, depth - 1) for part in _reachable_parts(value))


def _reachable_parts(value: Any) -> Iterator[Any]:
    """Yield what a value's code reaches through it, without looking at global variables."""
    if isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
        for each in value.modules():
            yield from get_python_attributes(each).values()
            yield from (type(each).forward, each._forward_pre_hooks, each._forward_hooks)
    elif isinstance(value, types.FunctionType):
        yield from read_closure(value).values()
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    else:
        yield from _inner_values(value)


def find_python_state(model: nn.Module) -> list[Any]:
    """Find every value in the Python state of any module, nested ones too, each once."""
    found: dict[int, Any] = {}

    def visit(value: Any, depth: int) -> None:
        if id(value) in found or isinstance(value, STATE_CONSTANTS):
            return
        found[id(value)] = value
        for part in _inner_values(value) if depth else ():
            visit(part, depth - 1)

    for module in model.modules():
        for value in get_python_attributes(module).values():
            visit(value, MAX_DEPTH)
    return list(found.values())
