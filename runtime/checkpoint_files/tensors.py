"""Tensors and plain values as the record describes them."""

from __future__ import annotations

from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.graph.tensors import ELEMENT_SIZE_BYTES
from .manifest import SavedTensor


def describe(name: str, tensor: Tensor) -> SavedTensor:
    """A tensor's shape and dtype; that of the whole for one spread over ranks.

    Raises:
        InvalidInput: It is sparse, or of a dtype that documents do not name.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ELEMENT_SIZE_BYTES or tensor.layout is not torch.strided:
        raise InvalidInput(
            f"cannot save {name}, a {tensor.layout} tensor of {tensor.dtype}; dense ones of "
            f"{', '.join(ELEMENT_SIZE_BYTES)} can be"
        )
    return SavedTensor(shape=tuple(tensor.shape), dtype=dtype)


def torch_dtype(saved: SavedTensor) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, saved.dtype))


def same_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether values keep their meaning when converted: both floating, complex or whole."""
    return (one.is_floating_point, one.is_complex) == (other.is_floating_point, other.is_complex)


def as_json(name: str, value: Any) -> JsonValue:
    """A hyperparameter as JSON: tensors of one element are numbers, tuples are lists.

    Raises:
        InvalidInput: It is something else.
    """
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [as_json(name, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(f"{name}[{key!r}]", item) for key, item in value.items()}
    raise InvalidInput(
        f"cannot save {name}, a {type(value).__name__}; numbers, text, lists, dictionaries with "
        "text as keys and None can be"
    )


def like(current: Any, saved: JsonValue) -> Any:
    """A saved hyperparameter in the form of the present one.

    A tensor is filled in place, because a captured graph may read it.
    """
    if isinstance(current, Tensor) and isinstance(saved, int | float):
        return current.fill_(saved)
    if isinstance(current, tuple | list) and isinstance(saved, list):
        if len(current) == len(saved):
            items = [like(ours, theirs) for ours, theirs in zip(current, saved, strict=True)]
        else:
            items = list(saved)
        return type(current)(items)
    return saved
