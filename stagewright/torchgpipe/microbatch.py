"""A batch, a tensor or a tuple of tensors, split and put together as torchgpipe does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import InvalidInput

TensorOrTensors = Tensor | tuple[Tensor, ...]


def check(value: Any, what: str = "the input") -> None:
    """Refuse what is neither a tensor nor a tuple of tensors.

    Raises:
        TypeError: Naming the type that was found.
    """
    found = value if isinstance(value, tuple) else (value,)
    if not found:
        raise TypeError(f"expected Tensor, but {what} is an empty tuple")
    for item in found:
        if not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__} in {what}")


def scatter(value: TensorOrTensors, chunks: int) -> list[tuple[Tensor, ...]]:
    """Micro-batches along the first dimension, each as a tuple.

    Args:
        value: The batch.
        chunks: At most this many; all but the last have the same size, as ``torch.chunk`` cuts.

    Raises:
        InvalidInput: Tensors fall into different numbers of micro-batches.
    """
    columns = [tensor.chunk(chunks) for tensor in _tuple(value)]
    counts = [len(column) for column in columns]
    if len(set(counts)) > 1:
        sizes = [len(tensor) for tensor in _tuple(value)]
        raise InvalidInput(
            f"tensors of {sizes} samples fall into {counts} micro-batches; give tensors with the "
            "same first dimension"
        )
    return list(zip(*columns, strict=True))


def gather(microbatches: list[tuple[Tensor, ...]], atomic: bool) -> TensorOrTensors:
    """Put micro-batches together along the first dimension.

    Args:
        microbatches: Each a tuple.
        atomic: Whether the batch is one tensor rather than a tuple.
    """
    joined = tuple(torch.cat(column) for column in zip(*microbatches, strict=True))
    return joined[0] if atomic else joined


def _tuple(value: TensorOrTensors) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
