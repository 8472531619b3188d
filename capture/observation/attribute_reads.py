"""Names of the attributes that a model's forward reads, found by running it and in its code."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .interception import replace_attribute

ALL = "__dict__"
"""Read where code looks at all attributes at once."""

PACKAGE = __name__.partition(".")[0]

_READ_BY_TORCH = (nn.Module._call_impl, nn.Module._wrapped_call_impl)

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


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


def find_loaded_names(kinds: Iterable[type[nn.Module]]) -> set[str]:
    """Return the names that methods of classes may read, also where a forward never got to.

    What they only assign is left out; every string is taken for a name, as in ``getattr``.
    Functions of the same package that they call by their global names are read, too.
    """
    bases = {base for kind in kinds for base in kind.__mro__ if base not in (nn.Module, object)}
    found = {"forward"}.union(*(_names_in(function.__code__) for function in _READ_BY_TORCH))
    return found.union(*(_names_of_class(base) for base in bases))


@lru_cache(maxsize=4096)
def _names_of_class(kind: type) -> frozenset[str]:
    # A forward never constructs, copies or prints its own module.
    methods = [
        value
        for key, value in vars(kind).items()
        if not key.startswith("__") or key in ("__call__", "__getattr__", "__getattribute__")
    ]
    package = kind.__module__.partition(".")[0]
    pending = [function for method in methods for function in find_functions(method)]
    found: set[str] = set()
    seen: set[CodeType] = set()
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        found.update(_names_in(function.__code__))
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and _root(called.__globals__) == package:
                pending += find_functions(called)
    return frozenset(found)


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
            for cell in each.__closure__ or ():
                with suppress(ValueError):  # a cell may be empty
                    pending.append(cell.cell_contents)


def _names_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS and isinstance(instruction.argval, str):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from (part for part in constant if isinstance(part, str))


def _root(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
