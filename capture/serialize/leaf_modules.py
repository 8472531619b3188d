"""Serialization of ``torch.nn`` leaf modules as a type and its constructor's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.graph.allowed_ops import MODULES
from ...core.graph.arguments import Setting
from ...core.graph.graph import LeafModule
from ...core.units import name_type
from ..observation.interception import HOOKS
from ..program.mode_dependent import AttentionDropout
from ..program.program import named_tensors
from .operations import NotSerializable


def leaf_type(name: str) -> type[nn.Module] | None:
    """Return the class of a name, if it is on the list."""
    if name not in MODULES:
        return None
    found: type[nn.Module] = (
        AttentionDropout if name == AttentionDropout.__name__ else getattr(nn, name)
    )
    return found


def describe_leaf(name: str, module: nn.Module) -> LeafModule:
    """Describe a module of a listed type that is as its constructor makes it, without hooks.

    Any other is `NotSerializable`.
    """
    kind = type(module).__name__
    if leaf_type(kind) is not type(module):
        raise NotSerializable(f"a module of type {kind}, whose code is its own")
    if _is_altered(module):
        raise NotSerializable(f"a {kind} with hooks or a forward of its own")
    leaf = LeafModule(name=name, type=kind, settings=_settings(module), training=module.training)
    try:
        again = build_leaf(leaf)
    except Exception as error:
        raise NotSerializable(f"a {kind} that its constructor does not make") from error
    expected, found = _configuration(again), _configuration(module)
    changed = any(name not in found or found[name] != expected[name] for name in expected)
    if changed or _shapes(again) != _shapes(module):
        raise NotSerializable(f"a {kind} that was changed after it was made")
    return leaf


def build_leaf(leaf: LeafModule, dtype: torch.dtype | None = None) -> nn.Module:
    """Construct the module that a `LeafModule` describes, on the meta device."""
    kind = leaf_type(leaf.type)
    assert kind is not None, "reading a graph checks its modules"
    given: dict[str, Any] = dict(leaf.settings)
    accepted = _parameters(kind)
    if "device" in accepted:
        given["device"] = "meta"
    if dtype is not None and "dtype" in accepted:
        given["dtype"] = dtype
    with torch.device("meta"):
        module = kind(**given)
    return module.train(leaf.training)


def _settings(module: nn.Module) -> dict[str, Setting]:
    """Return the constructor arguments that differ from their defaults."""
    defaults = _parameters(type(module))
    settings: dict[str, Setting] = {}
    for name in sorted(MODULES[type(module).__name__]):
        if hasattr(module, name):
            value = _plain(getattr(module, name), name)
            default = defaults[name].default if name in defaults else inspect.Parameter.empty
            if value != default or type(value) is not type(default):
                settings[name] = value
    return settings


def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters by name."""
    # Recurrent modules take *args and **kwargs for their base class, so include the bases'.
    found: dict[str, inspect.Parameter] = {}
    for owner in reversed(kind.__mro__):
        if owner not in (object, nn.Module) and "__init__" in vars(owner):
            found |= inspect.signature(vars(owner)["__init__"]).parameters
    return found


def _plain(value: Any, name: str) -> Setting:
    if name == "bias":
        return value is not None and value is not False
    if isinstance(value, tuple | list | torch.Size):
        return tuple(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise NotSerializable(f"a setting {name} of type {type(value).__name__}")


def _configuration(module: nn.Module) -> dict[str, object]:
    """Return the plain attributes of a module."""
    plain = (bool, int, float, str, tuple, type(None))
    return {name: value for name, value in vars(module).items() if isinstance(value, plain)}


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}


def is_plain_sequence(module: nn.Module) -> bool:
    """Return True if a module only calls its children one after the other."""
    return type(module) is nn.Sequential and bool(len(module)) and not _is_altered(module)


def _is_altered(module: nn.Module) -> bool:
    """Return True if an instance does something else than its class: by hooks, or its forward."""
    return any(getattr(module, hooks, None) for hooks in HOOKS) or "forward" in vars(module)


def iterate_leaves(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the leaf modules that a nested ``nn.Sequential`` calls, in order, with their names."""
    if is_plain_sequence(module):
        for own, child in module._modules.items():
            assert child is not None, "a Sequential calls every child"
            yield from iterate_leaves(f"{name}.{own}", child)
    else:
        yield name, module


def run_on_meta(name: str, module: nn.Module, given: Tensor) -> Tensor:
    """Run a copy of a listed leaf on the meta device and return its output."""
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
    again = build_leaf(describe_leaf(name, module), dtypes[0] if dtypes else None)
    try:
        with torch.no_grad():
            made = again(given)
    except Exception as error:
        raise NotSerializable(f"{name_type(module)} that does not run without memory") from error
    if not isinstance(made, Tensor):
        raise NotSerializable(f"{name_type(module)} that returns more than one tensor")
    return made
