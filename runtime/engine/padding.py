"""A batch with fewer samples than the plan's, filled up for an evaluation and cut off again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...core.errors import InvalidInput


@dataclass(frozen=True)
class PartialTarget:
    """The target of the samples of a micro-batch that are not filled in.

    Attributes:
        target: Of these samples, a tensor or a nest of them.
        samples: How many; the micro-batch's first ones.
        of: All samples of the batch that are not filled in.
    """

    target: Any
    samples: int
    of: int


def check_evaluation_mode(module: nn.Module) -> None:
    """See that what is filled in cannot move batch statistics.

    Raises:
        InvalidInput: The module is in training mode.
    """
    if module.training:
        raise InvalidInput(
            "pad=True is for evaluation mode, in which samples do not see each other; call "
            "train(False) first"
        )


def count_samples(values: Any) -> int | None:
    """The first dimension of the first tensor in a nest; `None` if there is no tensor with one."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return None


def pad_samples(values: Any, size: int) -> Any:
    """Every tensor of a nest with copies of its last sample behind it, up to ``size``.

    Raises:
        InvalidInput: One has no sample, or more than ``size``.
    """

    def longer(tensor: Tensor) -> Tensor:
        here = len(tensor) if tensor.dim() else 0
        if not 0 < here <= size:
            raise InvalidInput(
                f"a batch of shape {tuple(tensor.shape)} cannot be filled up to {size} samples; "
                f"give 1 to {size}"
            )
        return torch.cat([tensor, tensor[-1:].expand(size - here, *tensor.shape[1:])])

    return pytree.tree_map_only(Tensor, longer, values)


def trim_padding(values: Any, size: int, samples: int) -> Any:
    """The first ``samples`` of every tensor of a nest, of ``size``.

    Raises:
        InvalidInput: A tensor is not of ``size`` samples, so that what was filled in is part of it.
    """

    def shorter(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != size:
            raise InvalidInput(
                f"an output of shape {tuple(tensor.shape)} is of all {size} samples together, and "
                f"{size - samples} of them were filled in; evaluate whole batches of this model"
            )
        return tensor[:samples]

    return values if samples == size else pytree.tree_map_only(Tensor, shorter, values)


def split_partial_target(
    target: Any, num_microbatches: int, size: int
) -> list[PartialTarget | None]:
    """A smaller batch's target by micro-batch; `None` where all samples are filled in.

    Args:
        target: A tensor or a nest of them, one entry a sample.
        num_microbatches: Of the plan.
        size: Samples of a micro-batch.
    """
    samples = count_samples(target)
    lengths = {
        len(t) if t.dim() else 0 for t in pytree.tree_leaves(target) if isinstance(t, Tensor)
    }
    if samples is None or lengths != {samples} or samples > num_microbatches * size:
        raise InvalidInput(
            f"a target with {sorted(lengths)} entries does not go with up to "
            f"{num_microbatches * size} samples; give one entry a sample"
        )
    found: list[PartialTarget | None] = []
    for first in range(0, num_microbatches * size, size):
        here = min(max(samples - first, 0), size)
        found.append(PartialTarget(_between(target, first, size), here, samples) if here else None)
    return found


def _between(values: Any, first: int, size: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[first : first + size], values)
