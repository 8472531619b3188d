"""Nested values of module calls: extracting tensors from containers and putting others back."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...core.errors import CaptureError
from ...core.units import name_type
from ..call_form import SAMPLE_CONSTANTS

GRAPH_CONSTANTS = (*SAMPLE_CONSTANTS, complex, torch.dtype, torch.device, torch.layout)
"""Types of values that a graph can contain."""


@dataclasses.dataclass(frozen=True)
class TensorPosition:
    """Placeholder for an extracted tensor: its position in the flat list."""

    index: int


def extract_tensors(value: Any, found: list[Tensor]) -> Any:
    """Append the value's tensors to ``found``; return it with a `TensorPosition` for each.

    Raises:
        CaptureError: The value contains something other than tensors, containers and constants.
    """
    if isinstance(value, Tensor):
        found.append(value)
        return TensorPosition(len(found) - 1)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError("a number computed from data is passed between modules")
    if isinstance(value, GRAPH_CONSTANTS):
        return value
    return _rebuilt(value, lambda item: extract_tensors(item, found))


def insert_tensors(value: Any, items: list[Any]) -> Any:
    """Return the value with each `TensorPosition` replaced by that element of ``items``."""
    if isinstance(value, TensorPosition):
        return items[value.index]
    if isinstance(value, GRAPH_CONSTANTS):
        return value
    return _rebuilt(value, lambda item: insert_tensors(item, items))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every tensor of a nest, those in data classes included.

    Unlike with torch's pytree, data classes need not be registered for that.
    """
    if isinstance(value, Tensor):
        return function(value)
    if not list_tensors(value):
        return value
    return _put_together(value, lambda item: map_tensors(function, item))


def replace_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a nest with its tensors replaced by others, in order."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), value)


def list_tensors(value: Any) -> list[Tensor]:
    """Return every tensor of a nest, in order; those in data classes included."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, _, item in _items(value) for tensor in list_tensors(item)]


def append_access(graph: fx.Graph, node: fx.Node, value: Any, index: int) -> fx.Node | None:
    """Append the operations that extract the tensor at position ``index`` from a node's value."""
    if isinstance(value, TensorPosition):
        return node if value.index == index else None
    for step, key, item in _items(value):
        if TensorPosition(index) in find_positions(item):
            return append_access(graph, graph.call_function(step, (node, key)), item, index)
    return None


def find_positions(value: Any) -> list[TensorPosition]:
    if isinstance(value, TensorPosition):
        return [value]
    return [place for _, _, item in _items(value) for place in find_positions(item)]


def keep_positions(value: Any) -> Any:
    """Return nested dicts of the positions alone, by index, key or field name."""
    if isinstance(value, TensorPosition):
        return value
    return {key: keep_positions(item) for _, key, item in _items(value) if find_positions(item)}


def collect_constants(value: Any) -> list[Any]:
    """Return every element that is not a container, in order."""
    found = _items(value)
    return [leaf for _, _, item in found for leaf in collect_constants(item)] if found else [value]


def is_representable(value: Any) -> bool:
    """Return True if the value, as an argument, can be part of a graph."""
    if isinstance(value, (TensorPosition, slice, *GRAPH_CONSTANTS)):
        return True
    if type(value) in (tuple, list, dict):
        return all(is_representable(item) for _, _, item in _items(value))
    return False


def _items(value: Any) -> list[tuple[Callable[[Any, Any], Any], Any, Any]]:
    """List each element with the function and the key that extract it."""
    if isinstance(value, tuple | list):
        return [(operator.getitem, position, item) for position, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(operator.getitem, key, item) for key, item in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, TensorPosition | type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(getattr, name, getattr(value, name)) for name in fields]
    return []


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a container with ``change`` applied to its elements."""
    try:
        return _put_together(value, change)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{name_type(value)} is passed between modules and cannot be rebuilt from other "
            f"elements: {error}"
        ) from error


def _put_together(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(item) for item in value))
    if type(value) in (tuple, list):
        return type(value)(change(item) for item in value)
    # Copy and overwrite: constructors of mappings and dataclasses (ModelOutput of transformers)
    # may take other arguments than their fields.
    made: Any = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            made[key] = change(item)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, change(getattr(value, field.name)))
        return made
    raise CaptureError(f"{name_type(value)} is passed between modules")
