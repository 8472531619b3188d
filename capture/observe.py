"""One eager forward, watched: what a tracer would flatten, freeze or lose, and in which module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CaptureError
from .calls import Frame, observed_calls
from .checkpoints import watched_checkpoints
from .gradients import watched_gradients
from .guard import ParameterGuard
from .mode_reads import mode_readers
from .nested import is_plain, take_tensors
from .program import storage_key
from .state import plain_attributes, random_state


@dataclass(frozen=True)
class TensorForm:
    """What a tensor was like, without its data."""

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
        output: Its value, with a `Place` for every tensor.
        forms: Those tensors.
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


@dataclass
class Observation:
    """What one eager forward showed.

    Attributes:
        calls: Every module call by path and number.
        reasons: Why a module must be called as its author wrote it, by path; the model itself
            has the empty path.
        suspects: Modules that keep something from call to call, which need not matter.
        mode_readers: Modules that looked at ``self.training``.
        functions: Custom autograd functions by class, with the modules that apply them.
        checkpointed: Arguments of ``torch.utils.checkpoint`` for modules that their parent
            checkpoints.
        remarks: What the traced model does not do, though no number depends on it.
    """

    calls: dict[tuple[str, int], RecordedCall] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    mode_readers: set[str] = field(default_factory=set)
    functions: dict[type, set[str]] = field(default_factory=dict)
    checkpointed: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def blame(self, path: str, reason: str) -> None:
        """Remember a reason; the first one counts."""
        self.reasons.setdefault(path, reason)


@contextmanager
def observed(model: nn.Module) -> Iterator[tuple[Observation, _Watch]]:
    """Watch the model while it is called inside.

    Raises:
        CaptureError: The model is about to change a parameter of its own; it was not changed.
    """
    found = Observation()
    for path, module in model.named_modules():
        if path and any(getattr(module, table) for table in HOOKS):
            found.blame(path, "has hooks, which run around it")
    watch = _Watch(found)
    before = plain_attributes(model)
    with ExitStack() as stack:
        watch.stack = stack.enter_context(observed_calls(model, watch.call))
        stack.enter_context(watched_checkpoints(watch.checkpoint))
        stack.enter_context(watched_gradients(watch.gradient))
        stack.enter_context(ParameterGuard(model))
        found.mode_readers = stack.enter_context(mode_readers(model))
        yield found, watch
    _changed_attributes(model, before, found)


def function_owners(seen: Observation) -> dict[str, str]:
    """Why the modules that apply custom autograd functions must stay as they are, by path."""
    return {
        path: f"applies the custom autograd function {function.__name__!r}"
        for function, paths in seen.functions.items()
        for path in sorted(paths)
    }


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Watch:
    """Attributes what happens to the innermost module in whose code it happens."""

    def __init__(self, found: Observation) -> None:
        self._found = found
        self.stack: list[Frame] = []
        self._numbers: Counter[str] = Counter()
        self._random = random_state()[1:]
        self._seen: set[Any] = set()

    def call(
        self, frame: Frame, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        caller = self.stack[-2].path if len(self.stack) > 1 else ""
        self.settle(caller, (args, kwargs))
        given: list[Tensor] = []
        problem, plain = "", False
        try:
            plain = is_plain(take_tensors((args, kwargs), given))
        except CaptureError as error:
            problem = str(error)
        versions = [_version(tensor) for tensor in given]
        result = run()
        self.settle(frame.path, result)
        number = self._numbers[frame.path]
        self._numbers[frame.path] += 1
        self._found.calls[frame.path, number] = _record(given, versions, result, plain, problem)
        return result

    def settle(self, path: str, values: Any) -> None:
        """Put down to ``path`` what changed since the last call began or ended."""
        state = random_state()[1:]
        if state != self._random:
            self._random = state
            self._found.blame(path, "draws Python's or numpy's random numbers")
        for function in _new_functions(values, self._seen):
            self._found.functions.setdefault(function, set()).add(path)

    def gradient(self, what: str) -> None:
        """A hook on a tensor, or a gradient taken inside forward."""
        self._found.blame(self.stack[-1].path if self.stack else "", what)

    def checkpoint(self, function: Any, options: dict[str, Any]) -> None:
        target = checkpointed_module(function)
        here = self.stack[-1] if self.stack else None
        own = here is not None and here.module is target
        paths = {id(module): name for name, module in reversed(list(self._root.named_modules()))}
        if target is not None and not own and paths.get(id(target)):
            self._found.checkpointed[paths[id(target)]] = options
            self._found.blame(paths[id(target)], "is recomputed in its backward (checkpoint)")
        elif here is not None and here.path:
            self._found.blame(here.path, "recomputes in its backward (checkpoint)")
        else:
            self._found.remarks.append(
                "activation checkpointing in forward of the model itself is not kept; "
                "let the planner recompute instead"
            )

    @property
    def _root(self) -> nn.Module:
        return self.stack[0].module


def checkpointed_module(function: Any) -> nn.Module | None:
    """The module that a checkpointed callable calls, where it says so."""
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
        output = take_tensors(result, made)
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
    return -1 if tensor.is_inference() else tensor._version


def _new_functions(values: Any, seen: set[Any]) -> Iterator[type]:
    """Custom autograd functions among the nodes made since the last look."""
    tensors: list[Tensor] = []
    try:
        take_tensors(values, tensors)
    except CaptureError:
        tensors = _tensors_anywhere(values)
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function = type(node)._forward_cls
            if not _is_torchs_own(function):
                yield function
        pending += [parent for parent, _ in node.next_functions if parent is not None]


def _is_torchs_own(function: type) -> bool:
    """Checkpointing, seen otherwise, and the derivatives of registered operators."""
    return function.__module__.startswith("torch._library") or issubclass(
        function, torch.utils.checkpoint.CheckpointFunction
    )


def _tensors_anywhere(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _changed_attributes(model: nn.Module, before: Any, found: Observation) -> None:
    """State in plain attributes: a number that changed is a count; the rest may be a cache."""
    after = plain_attributes(model)
    for path, module in model.named_modules():
        old, new = before.get(id(module), {}), after.get(id(module), {})
        for name in sorted({*old, *new}):
            was, now = old.get(name), new.get(name)
            if was is now:
                continue
            reason = f"changes {name!r}, which it keeps from call to call"
            if path and isinstance(was, int | float) and isinstance(now, int | float):
                if was != now:
                    found.blame(path, reason)
            elif path:
                found.suspects.setdefault(path, reason)
