"""Snapshot of a model when it was cut, to refuse steps after the model was changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ...capture.captured import Captured
from ...capture.observation.attribute_reads import ALL, LoadedNames, find_loaded_names
from ...capture.observation.interception import HOOKS
from ...capture.observation.outside_state import iterate_globals
from ...capture.observation.python_state import (
    CONTAINERS,
    MAX_DEPTH,
    STATE_CONSTANTS,
    TABLES,
    is_array,
    is_plain_object,
    read_attributes,
    read_closure,
)
from ...capture.program.program import modules_called
from ...core.errors import PlanMismatch
from ...core.units import name_type
from ..replicas.sharded import is_sharded

_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), *TABLES))
"""Attributes that torch keeps; hooks and modes among them are looked at by themselves."""

_ABSENT = object()

GROWING = (list, set, deque)
"""Types whose methods that add elements do nothing else."""

MAX_ARRAY_BYTES = 2**20
"""Largest numpy array whose contents are compared; of larger ones it is the object."""


@dataclass(frozen=True)
class _Holder:
    """A module or what else holds values, with what it held, under the name of its place."""

    name: str
    value: Any
    before: Mapping[Any, Any]
    ignores: Callable[[Any], bool] = lambda key: False


@dataclass(frozen=True)
class _ArrayContents:
    """A numpy array at one time: traced layers keep the numbers that were read from it."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Any) -> _ArrayContents:
        return cls(array.shape, array.tobytes())


class ModelSnapshot:
    """The modules, weights, hooks, attributes and global numbers of a model when it was cut.

    Traced layers never run the model's Python again, so that a change there would be lost without
    a word. Modules that are called as written may change their own attributes, as they run; but
    neither they nor others may be replaced, since stages and optimizers hold them.

    Attributes that forward does not read may change: ``model.epoch = 3`` changes no result.
    """

    def __init__(self, captured: Captured) -> None:
        program = captured.program
        self._modules = list(program.model.named_modules())
        self._kinds = [type(module) for _, module in self._modules]
        self._children = [dict(module._modules) for _, module in self._modules]
        called = _modules_called_in(captured)
        if captured.evaluation is not None:
            called &= _modules_called_in(captured.evaluation)
        self._traced = [each for each in self._modules if each[1] not in called]
        self._hooks = [_hooks_of(module) for _, module in self._traced]
        self._holders = [
            *_find_holders(self._traced, {*program.changed}, _names_read(captured)),
            *(_Holder(kind.__name__, kind, _entries(kind)) for kind in self._own_kinds()),
        ]
        self._globals = {
            full: (names, name, names[name])
            for full, names, name in iterate_globals(module for _, module in self._traced)
            if isinstance(names[name], STATE_CONSTANTS)
        }
        self.remember_tensors()

    def _own_kinds(self) -> Iterator[type[nn.Module]]:
        """Yield the traced modules' classes that are not torch's, and their bases, each once."""
        kinds = {base: None for _, module in self._traced for base in type(module).__mro__}
        for kind in kinds:
            if issubclass(kind, nn.Module) and not kind.__module__.startswith("torch."):
                yield kind

    def remember_tensors(self) -> None:
        """Take note of the model's parameters and buffers after they were moved or converted."""
        self._parameters = [dict(module._parameters) for _, module in self._modules]
        self._buffers = [dict(module._buffers) for _, module in self._traced]

    def check(self, *, training: bool) -> None:
        """Check that the model is what it was, and in the pipeline's mode.

        Raises:
            PlanMismatch: It was changed; the message names what was.
        """
        if self._modules[0][1].training != training:
            raise PlanMismatch(
                f"the model is in {'evaluation' if training else 'training'} mode, and this "
                "pipeline is not; call train() or eval() of the pipeline, which switches both"
            )
        for change in self._changes():
            raise PlanMismatch(
                f"the model was changed after this pipeline was built: {change}. The stages are "
                "those captured then; build the pipeline again, and its optimizer if weights are "
                "new, or keep a number that changes in a buffer and change that in place"
            )

    def _changes(self) -> Iterator[str]:
        entries = zip(self._modules, self._kinds, self._children, self._parameters, strict=True)
        for (path, module), kind, children, parameters in entries:
            if type(module) is not kind:
                yield f"{path!r} was a {kind.__name__}, now it is {name_type(module)}"
            yield from _differences(path, children, module._modules)
            if not any(is_sharded(each) for each in parameters.values() if each is not None):
                yield from _differences(path, parameters, module._parameters)
        for (path, module), hooks, buffers in zip(
            self._traced, self._hooks, self._buffers, strict=True
        ):
            yield from _differences(path, buffers, module._buffers)
            if _hooks_of(module) != hooks:
                place = repr(path) if path else "the model itself"
                yield f"{place} was given a hook, which would not run, or lost one"
        for full, (names, name, was) in self._globals.items():
            if not _is_same(was, now := names.get(name, _ABSENT)):
                change = f"was {_describe(was)}, now it is {_describe(now)}"
                yield f"the global variable {full!r} {change}"
        for holder in self._holders:
            now = _entries(holder.value)
            yield from _differences(holder.name, holder.before, now, holder.ignores)


def _modules_called_in(captured: Captured) -> set[nn.Module]:
    program = captured.program
    return {
        inner
        for node in program.graph.nodes
        for module in modules_called(node, program)
        for inner in module.modules()
    }


def _hooks_of(module: nn.Module) -> list[list[int]]:
    return [list(getattr(module, table)) for table in HOOKS]


def _names_read(captured: Captured) -> LoadedNames | None:
    """Return the names of attributes on which a trace may depend; `None` if they are not known.

    Those read in a forward that was watched, and those that the modules' code reads: evaluation
    may go another way.
    """
    program = captured.program
    if program.attributes_read is None or ALL in program.attributes_read:
        return None
    kinds = {type(module) for module in program.model.modules()}
    found = find_loaded_names(kinds)
    return LoadedNames.of({*program.attributes_read, *found.read}, found.added_to)


def _find_holders(
    modules: list[tuple[str, nn.Module]],
    changed: set[tuple[str, str]],
    names: LoadedNames | None,
) -> Iterator[_Holder]:
    """Yield the modules, and what holds values in their attributes, each once.

    Containers, plain objects, and functions with closures or prepared arguments hold values.
    """
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> Iterator[_Holder]:
        inspected = isinstance(value, CONTAINERS) or is_plain_object(value)
        inspected = inspected or isinstance(value, partial | FunctionType)
        inspected = inspected and not isinstance(value, _ArrayContents)
        if not inspected or id(value) in seen or not depth:
            return
        seen.add(id(value))
        held = _entries(value)
        yield _Holder(name, value, held)
        for key, part in held.items():
            yield from visit(f"{name}.{key}", part, depth - 1)

    for path, module in modules:
        held = _entries(module)

        def ignores(name: str, path: str = path) -> bool:
            # A forward of the whole model, run beside the pipeline, changes some: mostly caches.
            if names is None:
                return (path, name) in changed
            return (path, name) in changed or name not in names.read | names.added_to

        yield _Holder(path, module, held, ignores)
        for name in held:
            # A list that is only added to, such as of maps to look at later, may grow.
            grows = names is not None and name in names.added_to and type(held[name]) in GROWING
            if not ignores(name) and not grows:
                yield from visit(f"{path}.{name}".lstrip("."), held[name], MAX_DEPTH)


def _entries(value: Any) -> dict[Any, Any]:
    """Return what a module, class, container or plain object holds; arrays by their contents."""
    return {
        key: _ArrayContents.of(held) if is_array(held) and held.nbytes <= MAX_ARRAY_BYTES else held
        for key, held in _read_entries(value).items()
    }


def _read_entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, nn.Module):
        return {k: v for k, v in vars(value).items() if k not in _OF_EVERY_MODULE}
    if isinstance(value, type):  # what libraries keep on classes under other names, they may change
        return {
            k: v
            for k, v in vars(value).items()
            if k == "forward" or (isinstance(v, STATE_CONSTANTS) and not k.startswith("_"))
        }
    if isinstance(value, partial):
        return {"func": value.func, **dict(enumerate(value.args)), **value.keywords}
    if isinstance(value, FunctionType):  # the variables of its closure
        return read_closure(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set | frozenset):
        return dict.fromkeys(value)
    if isinstance(value, CONTAINERS):
        return dict(enumerate(value))
    return read_attributes(value)


def _differences(
    name: str,
    before: Mapping[Any, Any],
    now: Mapping[Any, Any],
    ignores: Callable[[Any], bool] = lambda key: False,
) -> Iterator[str]:
    if len(before) == len(now) and all(
        key in before and _is_same(before[key], value) for key, value in now.items()
    ):
        return
    for key in [*before, *(key for key in now if key not in before)]:
        was, found = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if not _is_same(was, found) and not ignores(key):
            place = f"{name}.{key}".lstrip(".")
            yield f"{place!r} was {_describe(was)}, now it is {_describe(found, was)}"


def _is_same(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if isinstance(was, _ArrayContents):
        return bool(was == now)
    return type(was) is type(now) and isinstance(was, STATE_CONSTANTS) and repr(was) == repr(now)


def _describe(value: Any, before: Any = _ABSENT) -> str:
    if value is _ABSENT:
        return "missing"
    if isinstance(value, STATE_CONSTANTS):
        return repr(value)
    if isinstance(value, _ArrayContents):
        return f"an array of shape {value.shape}" + (
            " with other values" if isinstance(before, _ArrayContents) else ""
        )
    article = "another" if type(before) is type(value) else "a"
    return f"{article} {'tensor' if isinstance(value, Tensor) else type(value).__name__}"
