"""Which weights have a gradient, where replicas may have used different ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def anywhere(has_one: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """For each weight whether any replica has a gradient; called on all of them.

    Args:
        has_one: Whether this replica does, of the same weights in the same order on each.
        group: The replicas.
        device: Where the group's messages are.
    """
    counts = torch.tensor(has_one, dtype=torch.float32, device=device)
    dist.all_reduce(counts, group=group)
    # Looked at only where this replica does not know: on a GPU it has to wait for the numbers.
    return list(has_one) if all(has_one) else [count > 0 for count in counts.tolist()]


def agree_on_gradients(weights: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give a weight a gradient of zeros where another replica has one and this one has none."""
    if not weights:
        return
    has_one = [weight.grad is not None for weight in weights]
    for weight, is_wanted in zip(weights, anywhere(has_one, group, weights[0].device), strict=True):
        if is_wanted and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
