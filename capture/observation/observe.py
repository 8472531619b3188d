"""Observation of one eager forward: what a tracer would flatten, freeze or lose, by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CaptureError
from ..program.program import storage_key
from ..sample import CallStructure
from .attribute_reads import watch_attribute_reads
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
from .preserve import copied, get_random_state
from .python_state import (
    ChangeKind,
    classify_change,
    find_iterators,
    find_tensors,
    get_python_attributes,
    reaches_storage,
    read_contents,
    read_globals,
)


@dataclass(frozen=True)
class TensorForm:
    """Shape, layout, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class RecordedCall:
    """One call of a module: what a stand-in must know to take its place.

    Attributes:
        output: Its value, with a `TensorPosition` for every tensor, whose forms are in ``forms``.
        given: Number of tensors it was called with.
        plain: Whether a graph can hold its other arguments.
        written: Positions of tensor arguments it changed in place.
        returned: Position of the argument whose memory each output shares, or `None`.
        problem: Why it cannot be replaced; empty if it can.
    """

    output: Any = None
    forms: tuple[TensorForm, ...] = ()
    given: int = 0
    plain: bool = True
    written: tuple[int, ...] = ()
    returned: tuple[int | None, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class AttributeChange:
    """A change of an attribute during a forward.

    Attributes:
        kind: Kind of change.
        outside: Whether it was not made in the module's own call.
        tensors: The number of tensors that the attribute is or holds now.
        losses: The number of those that are single numbers with a gradient, as a loss is.
    """

    kind: ChangeKind
    outside: bool
    tensors: int = 0
    losses: int = 0


@dataclass
class ForwardObservation:
    """Findings of one eager forward.

    Attributes:
        calls: Every module call by path and number.
        reasons: Why a module must be opaque, by path; the model itself has the empty path.
        suspects: Modules that keep Python state between calls, which may be just a cache.
        mode_readers: Modules that read ``self.training``.
        attributes_read: Names of attributes that forward read; `None` if that is not known.
        functions: Custom autograd functions by class, with the modules that apply them.
        checkpointed: Arguments of ``torch.utils.checkpoint`` for modules that their parent
            checkpoints.
        recomputed: Modules that recompute, or are recomputed by their parent.
        changed: Attributes that the forward changed, by path and name.
        stateful: Names of the state in Python that modules change in every call, by their paths.
        references: Parameters and buffers that a module's calls read although they are not its
            own, by name, with whether the calls changed them.
        globals: Global variables that the forward changed, or whose code writes them.
        remarks: Behaviour that the capture does not reproduce, without effect on the numbers.
    """

    calls: dict[tuple[str, int], RecordedCall] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    mode_readers: set[str] = field(default_factory=set)
    attributes_read: set[str] | None = None
    functions: dict[type, set[str]] = field(default_factory=dict)
    checkpointed: dict[str, dict[str, Any]] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    changed: dict[tuple[str, str], AttributeChange] = field(default_factory=dict)
    stateful: dict[str, str] = field(default_factory=dict)
    references: dict[nn.Module, dict[str, bool]] = field(default_factory=dict)
    globals: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def losses(self) -> tuple[str, ...]:
        """Return the full names of attributes that hold numbers with a gradient, as losses do."""
        return tuple(_full_name(*place) for place, how in self.changed.items() if how.losses)

    def blame(self, path: str, reason: str) -> None:
        """Record why a module must be opaque; the first reason counts."""
        self.reasons.setdefault(path, reason)


@dataclass(frozen=True)
class TracingTarget:
    """A model with its sample and the observation of an eager forward: what a tracer takes."""

    model: nn.Module
    structure: CallStructure
    flat: tuple[Tensor, ...]
    seen: ForwardObservation


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
    watch, globals_before = _ForwardWatcher(found, model), read_globals(model)
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
    now = read_globals(model)
    changed = {k for k in now.keys() | globals_before if now.get(k) != globals_before.get(k)}
    found.globals = sorted(changed | find_global_writes(model))
    if found.globals:
        found.stateful[""] = found.globals[0]
    _blame_changes(found, found.changed)


def explain_function_owners(seen: ForwardObservation) -> dict[str, str]:
    """Return why modules that apply custom autograd functions must be opaque, by path."""
    return {
        path: f"applies the custom autograd function {function.__name__!r}"
        for function, paths in seen.functions.items()
        for path in sorted(paths)
    }


class _ForwardWatcher:
    """Observer that attributes every event to the innermost module whose code causes it."""

    def __init__(self, found: ForwardObservation, model: nn.Module) -> None:
        self._found = found
        self.kept = PythonStateTracker(model)
        self.stack: list[ModuleCall] = []
        self._numbers: Counter[str] = Counter()
        self._random = get_random_state()[1:]
        self._seen: set[Any] = set()
        self._own: dict[str, set[int]] = {}
        self._kept_too: dict[tuple[str, int], bool] = {}

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
        with self.kept.inside(frame.module):
            result = run()
        self.settle(frame.path, result)
        number = self._numbers[frame.path]
        self._numbers[frame.path] += 1
        self._found.calls[frame.path, number] = _record(given, versions, result, plain, problem)
        return result

    def settle(self, path: str, values: Any) -> None:
        """Attribute to ``path`` what changed since the last call began or ended."""
        # torch's own generator is left out: tracers record torch's random operations correctly.
        state = get_random_state()[1:]
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


class PythonStateTracker:
    """Tracker of every module's Python state, and of whether the module itself changes it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {id(module): read_contents(module) for module in model.modules()}
        self._last = dict(self._before)
        self._outside: set[int] = set()

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Attribute changes of the module's state inside to the module itself."""
        self._look(module)
        try:
            yield
        finally:
            if id(module) in self._last:
                self._last[id(module)] = read_contents(module)

    def _look(self, module: nn.Module) -> None:
        if id(module) in self._last and self._last[id(module)] != read_contents(module):
            self._outside.add(id(module))

    def finish(self) -> dict[tuple[str, str], AttributeChange]:
        """Return every change since the beginning, by module path and attribute."""
        found: dict[tuple[str, str], AttributeChange] = {}
        for path, module in self._model.named_modules():
            self._look(module)
            old, new = self._before.get(id(module), {}), read_contents(module)
            for name in sorted({*old, *new}):
                was, now = old.get(name), new.get(name)
                if was != now:
                    outside = bool(path) and id(module) in self._outside
                    tensors = find_tensors(get_python_attributes(module).get(name))
                    losses = sum(t.numel() == 1 and t.grad_fn is not None for t in tensors)
                    kind = classify_change(was, now)
                    found[path, name] = AttributeChange(kind, outside, len(tensors), losses)
        return found


def report_repeated_changes(
    seen: ForwardObservation, again: dict[tuple[str, str], AttributeChange]
) -> None:
    """Blame changes that the second forward repeats; what is created once is a cache."""
    for (path, name), how in again.items():
        # A loss with a graph is for the backward of its own call; no later call can use it.
        if not how.losses or how.losses < how.tensors:
            seen.stateful.setdefault(path, name)
        first = seen.changed.get((path, name))
        if first is None:
            continue
        if how.kind != "object":
            _blame(seen, path, name, first)
        elif how.tensors:
            _blame_tensors(seen, path, name, first)


def report_state_changes(seen: ForwardObservation) -> None:
    """Blame modules for numbers that a single forward changed."""
    for (path, name), how in seen.changed.items():
        if how.kind in ("state", "drawn"):
            seen.stateful.setdefault(path, name)
        if how.kind == "state":
            _blame(seen, path, name, how)


def _blame_changes(
    seen: ForwardObservation, changed: dict[tuple[str, str], AttributeChange]
) -> None:
    # A number that changed is a counter, on which later steps may depend. Any other change may be
    # a cache that is filled once, so the module is only suspected. The root is judged after a
    # second forward: making it opaque would make the model uncuttable.
    for (path, name), how in changed.items():
        if how.kind == "drawn" or (path and how.kind == "state"):
            _blame(seen, path, name, how)
        elif how.losses:
            _blame_tensors(seen, path, name, how)
        elif path:
            seen.suspects.setdefault(path, f"changes {name!r}, which it keeps from call to call")


def _blame_tensors(seen: ForwardObservation, path: str, name: str, how: AttributeChange) -> None:
    # Tracing follows values from inputs to outputs, and would drop what lies beside that path.
    owner = path.rpartition(".")[0] if how.outside else path
    if owner:
        seen.blame(owner, f"leaves a tensor in {_full_name(path, name)!r}")
    elif not how.losses:  # opaque, the model could not be cut
        seen.remarks.append(f"a pipeline does not set {_full_name(path, name)!r}")


def _full_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _blame(seen: ForwardObservation, path: str, name: str, how: AttributeChange) -> None:
    owner, what = ("", f"{name!r} of {path!r}") if how.outside else (path, repr(name))
    seen.blame(owner, f"changes {what}, which it keeps from call to call")


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
