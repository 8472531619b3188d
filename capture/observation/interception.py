"""Interception of what a running model does: module calls, checkpoints, gradients, reads, writes.

Only classes and torch's functions are changed, and only meanwhile; the model itself is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.errors import CaptureError
from ..program.mutation import CHANGE_NO_VALUE
from ..program.program import storage_key

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or a class; restore it, or its absence, on exit."""
    # Read from `vars`, because getattr would bind methods and find those of base classes.
    had_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@dataclass
class ModuleCall:
    """Module call in progress; ``path`` is the first of the module's names in the model.

    ``at_base`` says whether ``nn.Module.__call__`` was reached; classes may put code around it.
    ``given`` are the storages of the tensors it was called with, where its observer notes them.
    """

    module: nn.Module
    path: str
    at_base: bool = False
    given: frozenset[int] = frozenset()


Observer = Callable[[ModuleCall, Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any]
"""Takes the call, a function that performs it, and its arguments; returns the call's value."""


@contextmanager
def watch_calls(model: nn.Module, observer: Observer) -> Iterator[list[ModuleCall]]:
    """Pass every module call through ``observer``; yield the stack of calls in progress."""
    # `__call__` is replaced on nn.Module and on every class of the model that overrides it, since
    # Python looks special methods up on the class.
    paths = {id(module): path for path, module in model.named_modules()}
    stack: list[ModuleCall] = []

    def wrapped(owner: type, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            base = owner is nn.Module
            # A subclass's __call__ that calls super().__call__ arrives here twice: one call.
            if id(module) not in paths:
                return original(module, *args, **kwargs)
            if stack and stack[-1].module is module and not stack[-1].at_base:
                stack[-1].at_base = base
                return original(module, *args, **kwargs)
            frame = ModuleCall(module, paths[id(module)], base)
            stack.append(frame)
            try:
                return observer(frame, lambda: original(module, *args, **kwargs), args, kwargs)
            finally:
                stack.remove(frame)

        return call

    owners = {
        owner
        for module in model.modules()
        for owner in type(module).__mro__
        if "__call__" in vars(owner) and issubclass(owner, nn.Module)
    } | {nn.Module}
    with ExitStack() as replaced:
        for owner in owners:
            call = wrapped(owner, vars(owner)["__call__"])
            replaced.enter_context(replace_attribute(owner, "__call__", call))
        yield stack


_CHECKPOINT: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]

_CHECKPOINT_OPTIONS = (
    "use_reentrant",
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
)


def _replace_checkpoint(replacement: Callable[..., Any]) -> AbstractContextManager[None]:
    # Replacing torch.utils.checkpoint.checkpoint itself would miss models that imported the
    # function by name. torch._disable_dynamo's wrapper looks its target up under this attribute at
    # every call, so setting it redirects every reference to the function.
    return replace_attribute(_CHECKPOINT, "__dynamo_disable", replacement)


def watch_checkpoints(seen: Callable[[Any, dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Call ``seen(function, options)`` at every checkpoint; reentrant ones become plain calls.

    A reentrant checkpoint runs without gradients, which hides custom autograd functions inside.
    """

    def watch(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen(function, {key: kwargs[key] for key in _CHECKPOINT_OPTIONS if key in kwargs})
        if kwargs.get("use_reentrant") is False:
            return _CHECKPOINT(function, *args, **kwargs)
        return call_plainly(function, *args, **kwargs)

    return _replace_checkpoint(watch)


def disable_checkpoints() -> AbstractContextManager[None]:
    """Replace every checkpoint by a plain call."""
    return _replace_checkpoint(call_plainly)


def call_plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    given = {key: value for key, value in kwargs.items() if key not in _CHECKPOINT_OPTIONS}
    return function(*args, **given)


@contextmanager
def watch_gradients(seen: Callable[[str], None]) -> Iterator[None]:
    """Call ``seen`` at this thread's tensor hooks and gradients, which tracers lose.

    ``seen`` gets a description.
    """
    # Every gradient, also torch.autograd.grad and Tensor.backward, passes _engine_run_backward. The
    # functions are replaced for all threads, and another may be training a model of its own.
    watching = threading.get_ident()
    hook: Any = Tensor.register_hook
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def register_hook(tensor: Tensor, function: Any) -> Any:
        if threading.get_ident() == watching:
            seen("hooks a tensor's gradient")
        return hook(tensor, function)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == watching:
            seen("takes a gradient inside its forward")
        return run(*args, **kwargs)

    with (
        replace_attribute(Tensor, "register_hook", register_hook),
        replace_attribute(torch.autograd, "_engine_run_backward", run_backward),
    ):
        yield


class _WatchedMode:
    """A descriptor for ``training`` that records its readers and leaves the value in place."""

    def __init__(self, paths: dict[int, str], readers: set[str]) -> None:
        self._paths, self._readers = paths, readers

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if id(module) in self._paths:
            self._readers.add(self._paths[id(module)])
        return vars(module)["training"]

    def __set__(self, module: nn.Module, value: bool) -> None:
        vars(module)["training"] = value


@contextmanager
def watch_mode_reads(model: nn.Module) -> Iterator[set[str]]:
    """Collect the paths of the modules whose mode is read inside, except torch's own modules."""
    # A data descriptor on the class takes precedence over the instance's attribute. torch's own
    # modules are handled by the tracers.
    readers: set[str] = set()
    paths = {id(module): path for path, module in model.named_modules()}
    with ExitStack() as replaced:
        for kind in {type(module) for module in model.modules()}:
            if not kind.__module__.startswith("torch.") and "training" not in vars(kind):
                watched = _WatchedMode(paths, readers)
                replaced.enter_context(replace_attribute(kind, "training", watched))
        yield readers


class ParameterGuard(TorchDispatchMode):
    """Dispatch mode that raises `CaptureError` if an operation would write to a parameter."""

    # Parameters could not be restored afterwards without keeping a second copy of all weights,
    # which a large model has no memory for. So the write is prevented.

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = name_storages(model.named_parameters())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        for tensor in _written(func._schema, args, given):
            name = self._names.get(storage_key(tensor))
            if name is not None:
                raise changes_parameter(name)
        return func(*args, **given)


class AccessWatch(TorchDispatchMode):
    """Dispatch mode that reports every access to a parameter or buffer of a model.

    ``seen`` is called with its storage, its name and whether the operation changes it. Unlike a
    look at attributes, this finds tensors reached through lists, closures, globals and hooks.
    """

    def __init__(self, model: nn.Module, seen: Callable[[int, str, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = name_storages([*model.named_parameters(), *model.named_buffers()])
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        written = {storage_key(tensor) for tensor in _written(func._schema, args, given)}
        for leaf in pytree.arg_tree_leaves(*args, **given):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                key = storage_key(leaf)
                if key in self._names:
                    self._seen(key, self._names[key], key in written)
        return func(*args, **given)


def name_storages(tensors: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Return the first name of each storage."""
    return {
        storage_key(tensor): name
        for name, tensor in reversed(list(tensors))
        if tensor.layout is torch.strided and not is_lazy(tensor)
    }


def changes_parameter(name: str) -> CaptureError:
    return CaptureError(
        f"forward changes its own parameter {name!r}; do so after the optimizer's step instead",
        operation=name,
    )


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    if not schema.is_mutable or schema.name.rpartition("::")[2] in (*CHANGE_NO_VALUE, "set_"):
        return
    for position, declared in enumerate(schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(declared.name)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.UninitializedParameter):
                yield tensor
