"""Global variables that a model's forward writes, found in its code.

A cache in a global variable changes in the first forward of a process only: a trial run that comes
later sees no change. The code is the same in every process, before the first forward and after.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType

from torch import nn

from .attribute_reads import find_functions

_ADDING = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}

_CHANGING = _ADDING | {"clear", "discard", "move_to_end", "pop", "popitem", "popleft", "remove"}


def find_global_writes(model: nn.Module) -> set[str]:
    """Return the full names of global variables that code which forward reaches writes.

    Followed are methods of the model's own classes, by name, and functions of their files. Found
    are assignments to variables declared ``global``, to their elements and attributes, and calls of
    methods that change containers; also through another name in the same function. Functions
    without source are left out.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    methods: dict[str, list[FunctionType]] = {}
    for kind in kinds:
        if kind is not object and kind.__module__.partition(".")[0] != "torch":
            for name, value in vars(kind).items():
                methods.setdefault(name, []).extend(find_functions(value))
    found: set[str] = set()
    pending = [*methods.get("forward", ()), *methods.get("__call__", ())]
    seen: set[CodeType] = set()
    while pending:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names, written = _read_source(function)
        for name in names:
            pending += methods.get(name, ())
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__ == function.__module__:
                pending += find_functions(called)
        for name in written & function.__globals__.keys():
            value = function.__globals__[name]
            # As in `read_outside_state`; `torch.add` is a method of no container.
            if not isinstance(value, type | ModuleType) and not callable(value):
                found.add(f"{function.__module__}.{name}")
    return found


@lru_cache(maxsize=4096)
def _read_source(function: FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a function mentions, and those of the globals that it writes."""
    with suppress(OSError, TypeError, SyntaxError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        nodes = list(ast.walk(tree))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        return frozenset(names), frozenset(_find_written(nodes))
    return frozenset(), frozenset()


def _find_written(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the global names that statements write, also through a local name for one."""
    declared = {n for node in nodes if isinstance(node, ast.Global) for n in node.names}
    assigned = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    given = {node.arg for node in nodes if isinstance(node, ast.arg)}
    yield from declared & assigned
    local = (assigned | given) - declared
    aliases = {
        target.id: node.value.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        base = _written_base(node)
        name = aliases.get(base, base) if base is not None else None
        if name is not None and name not in local:
            yield name


def _written_base(node: ast.AST) -> str | None:
    """Return ``G`` for a write to ``G[...]`` or ``G.x``, or a call of ``G.append`` or the like."""
    if isinstance(node, ast.Call):
        changing = isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING
        inner: ast.AST | None = node.func if changing else None
    else:
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        inner = node if stored and isinstance(node, ast.Subscript | ast.Attribute) else None
    if inner is None:
        return None
    while isinstance(inner, ast.Subscript | ast.Attribute):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) else None
