"""Padding of a batch with fewer samples than the plan's, for evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.observation.nested_values import list_tensors, map_tensors
from ...core.errors import InvalidInput


@dataclass(frozen=True)
class PartialTarget:
    """The target of a micro-batch's first samples, out of ``of`` in the batch without padding."""

    target: Any
    samples: int
    of: int


def check_evaluation_mode(module: nn.Module) -> None:
    """Check that a module is in evaluation mode, where padding cannot affect batch statistics."""
    if module.training:
        raise InvalidInput(
            "pad=True is for evaluation mode, in which samples do not affect each other; call "
            "train(False) first"
        )


def count_samples(values: Any) -> int | None:
    """Return the first dimension of a nest's first tensor; `None` without such a tensor."""
    return next((len(tensor) for tensor in list_tensors(values) if tensor.dim()), None)


def pad_samples(values: Any, size: int) -> Any:
    """Pad every tensor of a nest to ``size`` samples with copies of its last one."""

    def pad(tensor: Tensor) -> Tensor:
        here = len(tensor) if tensor.dim() else 0
        if not 0 < here <= size:
            raise InvalidInput(
                f"a batch of shape {tuple(tensor.shape)} cannot be padded to {size} samples; "
                f"pass 1 to {size}"
            )
        # Not with zeros: token ids and masks of zeros may be invalid inputs.
        return torch.cat([tensor, tensor[-1:].expand(size - here, *tensor.shape[1:])])

    return map_tensors(pad, values)


def trim_padding(values: Any, size: int, samples: int) -> Any:
    """Return the first ``samples`` of ``size`` samples of every tensor of a nest."""

    def trim(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != size:
            raise InvalidInput(
                f"an output of shape {tuple(tensor.shape)} combines all {size} samples, of which "
                f"{size - samples} are padding; evaluate this model on whole batches"
            )
        return tensor[:samples]

    return values if samples == size else map_tensors(trim, values)


def split_partial_target(
    target: Any, num_microbatches: int, size: int
) -> list[PartialTarget | None]:
    """Split a smaller batch's target by micro-batch; `None` for micro-batches of padding only."""
    samples = count_samples(target)
    lengths = {len(t) if t.dim() else 0 for t in list_tensors(target)}
    if samples is None or lengths != {samples} or samples > num_microbatches * size:
        raise InvalidInput(
            f"a target with {sorted(lengths)} entries does not match at most "
            f"{num_microbatches * size} samples; give one entry per sample"
        )
    found: list[PartialTarget | None] = []
    for first in range(0, num_microbatches * size, size):
        here = min(max(samples - first, 0), size)
        part = map_tensors(itemgetter(slice(first, first + size)), target)
        found.append(PartialTarget(part, here, samples) if here else None)
    return found
