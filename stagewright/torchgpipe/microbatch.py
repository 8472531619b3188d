"""Splitting and joining of batches, each a tensor or a tuple of tensors, as in torchgpipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput

TensorOrTensors = Tensor | tuple[Tensor, ...]


def check(value: Any, what: str = "the input") -> None:
    """Raise `TypeError` unless the value is a tensor or a tuple of tensors."""
    found = value if isinstance(value, tuple) else (value,)
    if not found:
        raise TypeError(f"expected Tensor, but {what} is an empty tuple")
    for item in found:
        if not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__} in {what}")


def scatter(value: TensorOrTensors, chunks: int) -> list[tuple[Tensor, ...]]:
    """Split a batch along the first dimension into micro-batches, each a tuple."""
    columns = [tensor.chunk(chunks) for tensor in _tuple(value)]
    counts = [len(column) for column in columns]
    if len(set(counts)) > 1:
        sizes = [len(tensor) for tensor in _tuple(value)]
        raise InvalidInput(
            f"tensors of {sizes} samples split into {counts} micro-batches; use tensors of equal "
            "first dimension"
        )
    return list(zip(*columns, strict=True))


def gather(microbatches: list[tuple[Tensor, ...]], atomic: bool) -> TensorOrTensors:
    """Join micro-batches along the first dimension; ``atomic`` returns a tensor, not a tuple."""
    joined = tuple(torch.cat(column) for column in zip(*microbatches, strict=True))
    return joined[0] if atomic else joined


def _tuple(value: TensorOrTensors) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
