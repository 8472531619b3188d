"""Targets of micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...core.errors import InvalidInput


def split_target(target: Any, num_microbatches: int) -> list[Any]:
    """A batch's target, a tensor or a nest of them, by micro-batch.

    Raises:
        InvalidInput: A tensor's first dimension does not divide into the micro-batches.
    """
    leaves, spec = pytree.tree_flatten(target)
    columns: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * num_microbatches)
            continue
        length = leaf.shape[0] if leaf.dim() else 0
        if not length or length % num_microbatches:
            raise InvalidInput(
                f"a target of shape {tuple(leaf.shape)} does not divide into {num_microbatches} "
                "micro-batches along its first dimension; give one entry a sample"
            )
        columns.append(torch.tensor_split(leaf, num_microbatches))
    return [pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def shapes_of(value: Any) -> str:
    """In words, for example ``(4, 10)``; of a nest all of them."""
    leaves = pytree.tree_leaves(value)
    found = [str(tuple(leaf.shape)) if hasattr(leaf, "shape") else repr(leaf) for leaf in leaves]
    return ", ".join(found)
