"""Names of the attributes that a model's forward reads, found by running it and in its code."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .interception import replace_attribute
from .python_state import read_closure

ALL = "__dict__"
"""Read where code looks at all attributes at once."""

PACKAGE = __name__.partition(".")[0]

_READ_BY_TORCH = (nn.Module._call_impl, nn.Module._wrapped_call_impl)

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")

_COUNTING = ("COPY", "LOAD_ATTR", "LOAD_CONST", "BINARY_OP", "SWAP", "STORE_ATTR")
"""Instructions of ``self.steps += 1``, which reads the attribute for nothing else."""

_ADDING = ("add", "append", "appendleft", "extend")


@dataclass(frozen=True)
class LoadedNames:
    """Names of attributes that code reads, and of those that it only adds elements to."""

    read: frozenset[str]
    added_to: frozenset[str]

    @classmethod
    def of(cls, read: Iterable[str], added_to: Iterable[str]) -> LoadedNames:
        return cls(frozenset(read), frozenset(added_to).difference(read))


@contextmanager
def watch_attribute_reads(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of attributes read inside from the model's modules, except torch's own."""
    names: set[str] = set()

    def watched(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(module: nn.Module, name: str) -> Any:
            # torch, and observers of this package, look at `__dict__` without reading it all.
            if name != ALL or _root(sys._getframe(1).f_globals) not in ("torch", PACKAGE):
                names.add(name)
            return original(module, name)

        return read

    with ExitStack() as replaced:
        for kind in {type(module) for module in model.modules()}:
            if not kind.__module__.startswith("torch."):
                read: Any = watched(kind.__getattribute__)
                replaced.enter_context(replace_attribute(kind, "__getattribute__", read))
        yield names


def find_loaded_names(kinds: Iterable[type[nn.Module]]) -> LoadedNames:
    """Return the names that methods of classes may read, also where a forward never got to.

    What they only assign or count up is left out; every string is taken for a name, as in
    ``getattr``. Functions of the same package that they call by their global names are read, too.
    """
    bases = {base for kind in kinds for base in kind.__mro__ if base not in (nn.Module, object)}
    found = [_names_of_class(base) for base in bases]
    of_torch = (_names_in(function.__code__) for function in _READ_BY_TORCH)
    return LoadedNames.of(
        {"forward"}.union(*of_torch, *(each.read for each in found)),
        {name for each in found for name in each.added_to},
    )


@lru_cache(maxsize=4096)
def _names_of_class(kind: type) -> LoadedNames:
    # A forward never constructs, copies or prints its own module.
    methods = [
        value
        for key, value in vars(kind).items()
        if not key.startswith("__") or key in ("__call__", "__getattr__", "__getattribute__")
    ]
    package = kind.__module__.partition(".")[0]
    pending = [function for method in methods for function in find_functions(method)]
    read: set[str] = set()
    added_to: set[str] = set()
    seen: set[CodeType] = set()
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        read.update(_names_in(function.__code__))
        added_to.update(_names_added_to(function.__code__))
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and _root(called.__globals__) == package:
                pending += find_functions(called)
    return LoadedNames.of(read, added_to)


def find_functions(value: Any) -> Iterator[FunctionType]:
    """Yield a method's function, whatever it is wrapped in."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    seen: set[int] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, FunctionType) and id(each) not in seen:
            seen.add(id(each))
            yield each
            pending.append(inspect.unwrap(each))
            pending += read_closure(each).values()


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, and its strings."""
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if (
            instruction.opname in _LOADS
            and isinstance(instruction.argval, str)
            and not _only_counts(instructions, index)
            and not _only_adds(instructions, index)
        ):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from (part for part in constant if isinstance(part, str))


def _names_added_to(code: CodeType) -> Iterator[str]:
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_ATTR" and _only_adds(instructions, index):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_added_to(constant)


def _only_counts(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Return True if a load of an attribute is part of ``self.steps += 1``."""
    around = instructions[max(index - 1, 0) : index + 5]
    return (
        tuple(each.opname for each in around) == _COUNTING
        and around[-1].argval == instructions[index].argval
    )


def _only_adds(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Return True if a load of an attribute is part of ``self.seen.append(...)``."""
    following = instructions[index + 1 : index + 2]
    return any(each.opname in _LOADS and each.argval in _ADDING for each in following)


def _root(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
