"""Conversion between tensors or plain values and their descriptions in the manifest."""

from __future__ import annotations

from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.graph.tensors import ELEMENT_SIZE_BYTES
from ...core.units import name_type
from .manifest import SavedTensor


def describe(name: str, tensor: Tensor) -> SavedTensor:
    """Return a dense tensor's shape and dtype; for one sharded over ranks, those of the whole."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ELEMENT_SIZE_BYTES or tensor.layout is not torch.strided:
        raise InvalidInput(
            f"cannot save {name}, a {tensor.layout} tensor of {tensor.dtype}; supported are dense "
            f"tensors of {', '.join(ELEMENT_SIZE_BYTES)}"
        )
    return SavedTensor(shape=tuple(tensor.shape), dtype=dtype)


def torch_dtype(saved: SavedTensor) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, saved.dtype))


def is_same_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Return True if both are floating-point, both complex, or both integer types."""
    return (one.is_floating_point, one.is_complex) == (other.is_floating_point, other.is_complex)


def to_json_value(name: str, value: Any) -> JsonValue:
    """Convert a hyperparameter to JSON: scalar tensors to numbers, tuples to lists."""
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json_value(name, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json_value(f"{name}[{key!r}]", item) for key, item in value.items()}
    raise InvalidInput(
        f"cannot save {name}, {name_type(value)}; supported are numbers, strings, lists, "
        "dictionaries with string keys, and None"
    )


def adapt_value(current: Any, saved: JsonValue) -> Any:
    """Convert a saved hyperparameter to the type of the current one.

    A tensor is filled in place, because a CUDA graph may read it.
    """
    if isinstance(current, Tensor) and isinstance(saved, int | float):
        return current.fill_(saved)
    if isinstance(current, tuple | list) and isinstance(saved, list):
        if len(current) == len(saved):
            items = [adapt_value(ours, theirs) for ours, theirs in zip(current, saved, strict=True)]
        else:
            items = list(saved)
        return type(current)(items)
    return saved
