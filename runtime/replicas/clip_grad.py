"""The norm of the whole model's gradients, whatever rank they are on, and what it decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def sum_of_squares(
    parameters: Iterable[Tensor], holders: Mapping[int, int], device: torch.device
) -> Tensor:
    """A rank's part of the squared norm, in double precision.

    Args:
        parameters: This rank's, each once.
        holders: By ``id`` of a parameter, how many ranks hold it, where that is not one; a
            gradient that several ranks hold counts once, shards of one together.
        device: Where it is summed.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = _here(parameter.grad)
            # Squares of half precision would overflow long before the gradients do.
            is_half = gradient.dtype in (torch.float16, torch.bfloat16)
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32 if is_half else None)
            squares += norm.double().to(device) ** 2 / holders.get(id(parameter), 1)
    return squares


def global_norm(
    parameters: Iterable[Tensor],
    holders: Mapping[int, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The norm over all ranks, the same on each; infinite or NaN if any gradient is.

    Args:
        parameters: See `sum_of_squares`.
        holders: Likewise.
        group: All ranks.
        device: Where the norm is summed.
    """
    squares = sum_of_squares(parameters, holders, device)
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply what there is of gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            _here(parameter.grad).mul_(factor)


def clipping_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients of a norm by so that it is at most ``max_norm``."""
    return min(1.0, max_norm / (norm + 1e-6))


def _here(gradient: Tensor) -> Tensor:
    """What of a gradient is on this rank; of one that is spread over ranks its shard."""
    return gradient.to_local().detach() if isinstance(gradient, DTensor) else gradient.detach()
