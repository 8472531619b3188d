"""Gradient norm of the whole model over all ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core.errors import NonFinite


@torch.no_grad()
def sum_of_squares(
    parameters: Iterable[Tensor],
    holders: Mapping[int, int],
    device: torch.device,
    *,
    sums_shards: bool = False,
) -> Tensor:
    """Return this rank's part of the squared norm, in double precision.

    ``holders`` gives, by ``id`` of a parameter, the number of ranks that hold it, where more than
    one do. Each of them contributes its fraction, so that the gradient counts once. Shards are
    parts of one gradient, added up by the caller over its ranks, or here over the shards' own mesh
    if ``sums_shards``, as for tensor parallelism around a pipeline.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.detach() if sums_shards else _local(parameter.grad)
            if gradient.layout is torch.sparse_coo:  # a row may occur several times until then
                gradient = gradient.coalesce().values()
            # Squares of half precision would overflow long before the gradients do.
            is_half = gradient.dtype in (torch.float16, torch.bfloat16)
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32 if is_half else None)
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            squares += norm.double().to(device) ** 2 / holders.get(id(parameter), 1)
    return squares


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients of those parameters that have one."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(factor)


def clipping_factor(norm: float, max_norm: float) -> float:
    """Return the factor that reduces a norm to at most ``max_norm``, as in ``torch.nn.utils``.

    Raises:
        NonFinite: The norm is infinite or NaN, so that an update would spoil the weights.
    """
    if not math.isfinite(norm):
        raise NonFinite(
            f"the norm of the gradients is {norm}, though the loss is finite: no weight was "
            "changed; call zero_grad() and go on with other data, or lower the learning rate"
        )
    return min(1.0, max_norm / (norm + 1e-6))


def _local(gradient: Tensor) -> Tensor:
    """Return the part of a gradient on this rank: its shard, or all of it."""
    # Without detach(): a sparse tensor changed in place does not change what it was detached from.
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
