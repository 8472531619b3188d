"""What a model is tried out with where its user gives nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.errors import InvalidInput


def together(samples: Sequence[Any]) -> Any:
    """Micro-batches as one batch: tensors of any nest, along their first dimension."""

    def joined(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return pytree.tree_map(joined, *samples)


def mean_of_squares(output: Any, target: Tensor) -> Tensor:
    """A loss that reaches every floating output; the target is not looked at.

    Raises:
        InvalidInput: There is none.
    """
    found = [
        value.square().mean()
        for value in pytree.tree_leaves(output)
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    if not found:
        raise InvalidInput("the model returns no floating tensor; give a loss and its target")
    return torch.stack(found).sum()


def no_target(num_samples: int) -> Tensor:
    """For `mean_of_squares`: one entry a sample."""
    return torch.zeros(num_samples)
