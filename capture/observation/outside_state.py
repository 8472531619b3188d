"""State outside a model that its code uses: global variables, class attributes and closures."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from .attribute_reads import find_functions
from .python_state import (
    OPAQUE_PACKAGES,
    ChangeKind,
    Contents,
    classify_change,
    read_closure,
    read_content,
)

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")

_FUNCTIONAL = (type, ModuleType, property, classmethod, staticmethod)

OutsideState = dict[tuple[int, str], Contents]
"""Contents of variables, by the identity of what holds them and by full name."""


def read_outside_state(model: nn.Module) -> OutsideState:
    """Describe the variables outside a model that the code of its own classes may change.

    These are the global variables that the code names, the attributes of the classes, and the
    variables of enclosing functions (``nonlocal``).
    """
    found: OutsideState = {}
    for kind in _own_classes(model.modules()):
        for name, value in vars(kind).items():
            if not name.startswith("__") and _is_data(value):
                full = f"{kind.__module__}.{kind.__qualname__}.{name}"
                found[id(kind), full] = read_content(value)
    for function in _reach_functions(model.modules()):
        for name, value in read_closure(function).items():
            if _is_data(value):
                full = f"{function.__module__}.{function.__qualname__}.{name}"
                found[id(function), full] = read_content(value)
    for full, names, name in iterate_globals(model.modules()):
        found[id(names), full] = read_content(names[name])
    return found


def find_changes(before: OutsideState, after: OutsideState) -> dict[str, ChangeKind]:
    """Return the variables that differ, by full name, and how."""
    changed = (key for key in {*before, *after} if before.get(key) != after.get(key))
    return {key[1]: classify_change(before.get(key), after.get(key)) for key in changed}


def iterate_globals(modules: Iterable[nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the global variables that the code of modules' own classes names, and where they are.

    Functions of the modules' files are followed where that code names them, imported ones are not.
    """
    for function in _reach_functions(modules):
        names = function.__globals__
        for name in _names_in(function.__code__) & names.keys():
            if _is_data(names[name]):
                yield f"{names.get('__name__')}.{name}", names, name


def _reach_functions(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Yield the functions of modules' own classes and files that their forward may come to.

    Methods are followed by their names alone, whatever object they are called of.
    """
    methods: dict[str, list[FunctionType]] = {}
    for kind in _own_classes(modules):
        for name, value in vars(kind).items():
            methods.setdefault(name, []).extend(find_functions(value))
    pending = [
        function
        for name, functions in methods.items()
        if name == "forward" or (name.startswith("__") and name not in ("__init__", "__new__"))
        for function in functions
    ]
    followed = {id(function) for function in pending}
    while pending:
        function = pending.pop()
        yield function
        found = [each for name in _words_in(function.__code__) for each in methods.get(name, ())]
        for name in _names_in(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                found += find_functions(value)
        for each in found:
            if id(each) not in followed:
                followed.add(id(each))
                pending.append(each)


def _own_classes(modules: Iterable[nn.Module]) -> list[type]:
    """Return the classes of modules, and their bases, that are no library's of tensors."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return [kind for kind in kinds if kind.__module__.partition(".")[0] not in OPAQUE_PACKAGES]


def _is_data(value: Any) -> bool:
    return not isinstance(value, _FUNCTIONAL) and not callable(value)


def _names_in(code: CodeType) -> set[str]:
    """Return the global variables that code reads or sets; attributes may have the same names."""
    return {
        each.argval
        for inner in _codes_in(code)
        for each in dis.get_instructions(inner)
        if each.opname in _GLOBAL
    }


def _words_in(code: CodeType) -> set[str]:
    """Return the names and texts in code, some of which are those of methods."""
    codes = list(_codes_in(code))
    texts = {text for inner in codes for text in inner.co_consts if isinstance(text, str)}
    return texts.union(*(inner.co_names for inner in codes))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes_in(inner)
