"""Observation of one eager forward: what a tracer would flatten, freeze or lose, by module."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CaptureError
from ..program.program import storage_key
from .attribute_reads import watch_attribute_reads
from .forward_observation import INPUT, CallKey, ForwardObservation, RecordedCall, TensorForm
from .global_writes import find_global_writes
from .interception import (
    HOOKS,
    AccessWatch,
    ModuleCall,
    ParameterGuard,
    watch_calls,
    watch_checkpoints,
    watch_gradients,
    watch_mode_reads,
)
from .nested_values import extract_tensors, is_representable
from .preserve import copied, get_untraced_random_state
from .python_state import find_iterators, reaches_storage
from .state_changes import PythonStateTracker, blame_changes


@contextmanager
def watch_forward(model: nn.Module) -> Iterator[tuple[ForwardObservation, _ForwardWatcher]]:
    """Watch the model while it is called inside; raise `CaptureError` if it changes a parameter."""
    found = ForwardObservation()
    for path, module in model.named_modules():
        if path and any(getattr(module, table) for table in HOOKS):
            found.blame(path, "has hooks, which run around it")
        if path and isinstance(module, torch.jit.ScriptModule):
            found.blame(path, "is a ScriptModule, which runs without Python")
    _iterators(model, found)
    # Before anything runs: an iterator that cannot be copied must not be advanced.
    watch = _ForwardWatcher(found, model)
    with ExitStack() as stack:
        watch.stack = stack.enter_context(watch_calls(model, watch.call))
        stack.enter_context(watch_checkpoints(watch.checkpoint))
        stack.enter_context(watch_gradients(watch.gradient))
        stack.enter_context(ParameterGuard(model))
        stack.enter_context(AccessWatch(model, watch.access))
        found.mode_readers = stack.enter_context(watch_mode_reads(model))
        found.attributes_read = stack.enter_context(watch_attribute_reads(model))
        yield found, watch
    found.changed = watch.kept.finish()
    found.globals = sorted(find_global_writes(model))
    if found.globals:
        found.stateful[""] = found.globals[0]
    blame_changes(found, found.changed)


class _ForwardWatcher:
    """Observer that attributes every event to the innermost module whose code causes it."""

    def __init__(self, found: ForwardObservation, model: nn.Module) -> None:
        self._found = found
        self.kept = PythonStateTracker(model)
        self.stack: list[ModuleCall] = []
        self._numbers: Counter[str] = Counter()
        self._random = get_untraced_random_state()
        self._seen: set[Any] = set()
        self._own: dict[str, set[int]] = {}
        self._kept_too: dict[tuple[str, int], bool] = {}
        self._modes: tuple[bool, bool] | None = None
        self._makers: dict[int, tuple[weakref.ref[Tensor], int, set[CallKey]]] = {}

    def call(
        self,
        frame: ModuleCall,
        run: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        caller = self.stack[-2].path if len(self.stack) > 1 else ""
        self.settle(caller, (args, kwargs))
        given: list[Tensor] = []
        problem, plain = "", False
        try:
            plain = is_representable(extract_tensors((args, kwargs), given))
        except CaptureError as error:
            problem = str(error)
        frame.given = frozenset(map(storage_key, given))
        versions = [_version(tensor) for tensor in given]
        number = self._numbers[frame.path]
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled()
        if not frame.path:
            self._modes = modes
            if len(given) == 1:
                self._note_maker(given[0], INPUT)
        if len(args) == 1 and not kwargs and modes == self._modes:
            self._found.received[frame.path, number] = self._find_makers(args[0])
        with self.kept.inside(frame.module):
            result = run()
        self.settle(frame.path, result)
        self._note_maker(result, (frame.path, number))
        if not frame.path:
            self._found.returned = self._find_makers(result)
        self._numbers[frame.path] += 1
        self._found.calls[frame.path, number] = _record(given, versions, result, plain, problem)
        return result

    def _find_makers(self, value: Any) -> set[CallKey]:
        """Return the calls that returned this very tensor, if it was not changed since."""
        found = self._makers.get(id(value))
        # An id may be that of a tensor that is gone; the reference says so.
        is_same = found is not None and isinstance(value, Tensor) and found[0]() is value
        return set(found[2]) if found and is_same and found[1] == _version(value) else set()

    def _note_maker(self, value: Any, call: CallKey) -> None:
        if isinstance(value, Tensor):
            calls = {*self._find_makers(value), call}
            self._makers[id(value)] = weakref.ref(value), _version(value), calls

    def settle(self, path: str, values: Any) -> None:
        """Attribute to ``path`` what changed since the last call began or ended."""
        # torch's own generator is left out: tracers record torch's random operations correctly.
        state = get_untraced_random_state()
        if state != self._random:
            self._random = state
            self._found.blame(path, "draws Python's or numpy's random numbers")
        for function in _new_functions(values, self._seen):
            self._found.functions.setdefault(function, set()).add(path)

    def gradient(self, what: str) -> None:
        """Record a hook on a tensor, or a gradient taken inside forward."""
        self._found.blame(self.stack[-1].path if self.stack else "", what)

    def access(self, key: int, name: str, written: bool) -> None:
        """Record a tensor that a module being called neither owns nor was given as an argument."""
        for frame in self.stack:
            own = self._own.get(frame.path)
            if own is None:
                tensors = (*frame.module.parameters(), *frame.module.buffers())
                own = self._own[frame.path] = {storage_key(tensor) for tensor in tensors}
            if key not in own and not self._is_argument(frame, key):
                read = self._found.references.setdefault(frame.module, {})
                read[name] = written or read.get(name, False)

    def _is_argument(self, frame: ModuleCall, key: int) -> bool:
        # The graph passes arguments on. A module that was given a tensor and keeps it, too, may
        # have read either: then it counts as kept.
        if key not in frame.given:
            return False
        if (frame.path, key) not in self._kept_too:
            self._kept_too[frame.path, key] = reaches_storage(frame.module, key)
        return not self._kept_too[frame.path, key]

    def checkpoint(self, function: Any, options: dict[str, Any]) -> None:
        target = checkpointed_module(function)
        here = self.stack[-1] if self.stack else None
        own = here is not None and here.module is target
        paths = {id(module): name for name, module in self.stack[0].module.named_modules()}
        # Recomputation changes no result, so the module is only suspected: it becomes opaque if
        # the traced model turns out different, as where a reentrant checkpoint loses gradients.
        if target is not None and not own and paths.get(id(target)):
            path = paths[id(target)]
            # A reentrant checkpoint allows no gradients of inputs and weights apart, which
            # profiles and zero-bubble schedules take.
            self._found.checkpointed[path] = options | {"use_reentrant": False}
            self._found.suspects.setdefault(path, "is recomputed in its backward (checkpoint)")
        else:
            path = here.path if here is not None else ""
            if path:
                self._found.suspects.setdefault(path, "recomputes in its backward (checkpoint)")
        self._found.recomputed.add(path)


def checkpointed_module(function: Any) -> nn.Module | None:
    """Return the module that a checkpointed callable calls, if it can be determined."""
    # Unwrap functools.partial: transformers checkpoints partial(layer.__call__, **kwargs).
    while hasattr(function, "func") and hasattr(function, "args"):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def _record(
    given: list[Tensor], versions: list[int], result: Any, plain: bool, problem: str
) -> RecordedCall:
    made: list[Tensor] = []
    try:
        output = extract_tensors(result, made)
    except CaptureError as error:
        return RecordedCall(problem=str(error))
    keys = {storage_key(tensor): position for position, tensor in enumerate(given)}
    return RecordedCall(
        output=output,
        forms=tuple(TensorForm.of(tensor) for tensor in made),
        given=len(given),
        plain=plain,
        written=tuple(
            position
            for position, tensor in enumerate(given)
            if _version(tensor) != versions[position]
        ),
        returned=tuple(keys.get(storage_key(tensor)) for tensor in made),
        problem=problem,
    )


def _version(tensor: Tensor) -> int:
    # The version counter counts writes in place; inference tensors have none.
    return -1 if tensor.is_inference() else tensor._version


def _new_functions(values: Any, seen: set[Any]) -> Iterator[type]:
    """Yield the custom autograd functions among the autograd nodes created since the last call."""
    tensors: list[Tensor] = []
    try:
        extract_tensors(values, tensors)
    except CaptureError:
        leaves = torch.utils._pytree.tree_leaves(values)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = type(node)._forward_cls
            # Checkpoints are observed separately; derivatives of registered operators can be
            # traced.
            if not function.__module__.startswith("torch._library") and not issubclass(
                function, torch.utils.checkpoint.CheckpointFunction
            ):
                yield function
        pending += [parent for parent, _ in node.next_functions if parent is not None]


def _iterators(model: nn.Module, found: ForwardObservation) -> None:
    """Blame modules that keep an iterator; raise `CaptureError` if a trial run would consume it."""
    for path, module in model.named_modules():
        for name, value, put in find_iterators(module):
            if put is None or copied(value) is None:
                where = "is or holds" if put else "holds in a tuple or set"
                raise CaptureError(
                    f"{name!r} {where} an iterator that cannot be copied or replaced, so a trial "
                    "run would consume it; keep a list and a position instead",
                    module=path or type(module).__name__,
                )
            found.blame(path, f"keeps the iterator {name!r}")
            found.stateful.setdefault(path, name)
