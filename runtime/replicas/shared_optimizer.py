"""Replicas of a stage that share the optimizer's state: each updates a part of the weights.

Rajbhandari et al. 2020, "ZeRO", section 5.1. Gradients are summed as for replicas that share
nothing. Of every weight one replica, its owner, keeps state; the others get the new value from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .gradient_sync import BUCKET_BYTES, split_by_size

_foreign: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()


def get_foreign_weights(optimizer: Optimizer) -> frozenset[int]:
    """Return the weights that other replicas update, by ``id``; an optimizer has no state there."""
    return _foreign.get(optimizer, frozenset())


class UpdateOwners:
    """Owners of the weights of one stage among its replicas.

    The same on all of them, because weights come in one order. Each gets about equally much.
    """

    def __init__(self, weights: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._by_owner: list[list[nn.Parameter]] = [[] for _ in range(dist.get_world_size(group))]
        filled = [0] * len(self._by_owner)
        # The largest first, each to the one that has least.
        for weight in sorted(weights, key=lambda each: -each.numel()):
            owner = filled.index(min(filled))
            self._by_owner[owner].append(weight)
            filled[owner] += weight.numel()

    @property
    def foreign(self) -> list[nn.Parameter]:
        """Return the weights that other replicas own."""
        return [
            weight
            for owner, weights in enumerate(self._by_owner)
            for weight in weights
            if owner != self._rank
        ]

    @torch.no_grad()
    def spread(self) -> None:
        """Give all replicas the owners' values; called on all of them."""
        pending = []
        for owner, weights in enumerate(self._by_owner):
            for some in _buckets(weights):
                message = torch.cat([weight.detach().reshape(-1) for weight in some])
                work = dist.broadcast(message, group_src=owner, group=self._group, async_op=True)
                pending.append((owner, some, message, work))
        for owner, some, message, work in pending:
            if work is not None:
                work.wait()
            if owner == self._rank:
                continue
            parts = message.split([weight.numel() for weight in some])
            for weight, part in zip(some, parts, strict=True):
                weight.copy_(part.view_as(weight))


def drop_foreign_gradients(optimizer: Optimizer, owned: Mapping[int, UpdateOwners]) -> None:
    """Have an optimizer's step ignore the weights that other replicas own.

    ``owned`` are this rank's stages with such weights. Register what converts weights around a step
    after this and before `spread_weights`.
    """
    foreign = [weight for stage in sorted(owned) for weight in owned[stage].foreign]
    if not owned:
        return
    _foreign[optimizer] = frozenset(map(id, foreign))

    def before(self: Optimizer, args: Any, kwargs: Any) -> None:
        # Without a gradient, an optimizer neither updates a weight nor makes state for it.
        for weight in foreign:
            weight.grad = None

    optimizer.register_step_pre_hook(before)


def spread_weights(optimizer: Optimizer, owned: Mapping[int, UpdateOwners]) -> None:
    """Have an optimizer's step end by giving all replicas the new weights."""
    if not owned:
        return

    def after(self: Optimizer, args: Any, kwargs: Any) -> None:
        for stage in sorted(owned):
            owned[stage].spread()

    optimizer.register_step_post_hook(after)


def _buckets(weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for weight in weights:
        kinds.setdefault(weight.dtype, []).append(weight)
    return [some for same in kinds.values() for some in split_by_size(same, _bytes, BUCKET_BYTES)]


def _bytes(weight: Tensor) -> int:
    return weight.nbytes
