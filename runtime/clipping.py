"""Clip gradients by the norm of the whole model's, whatever rank they are on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_to_global_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    holders: Mapping[int, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``.

    Args:
        parameters: This rank's, each once.
        max_norm: The norm allowed.
        holders: By ``id`` of a parameter, how many ranks hold it, where that is not one; a
            gradient that several ranks hold counts once, shards of one together.
        group: All ranks.
        device: Where the norm is summed.

    Returns:
        The norm before, the same on every rank.
    """
    gradients = {
        parameter: _here(parameter.grad) for parameter in parameters if parameter.grad is not None
    }
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter, gradient in gradients.items():
        norm = torch.linalg.vector_norm(gradient).double()
        squares += norm**2 / holders.get(id(parameter), 1)
    dist.all_reduce(squares, group=group)
    total = squares.sqrt()
    scale = float(max_norm / (total + 1e-6))
    if scale < 1:
        for gradient in gradients.values():
            gradient.mul_(scale)
    return total


def _here(gradient: Tensor) -> Tensor:
    """What of a gradient is on this rank; of one that is spread over ranks its shard."""
    return gradient.to_local().detach() if isinstance(gradient, DTensor) else gradient.detach()
