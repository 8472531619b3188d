"""Exchange of values and gradients between the ranks that share a stage.

The two conjugate operations of Shoeybi et al. 2019, "Megatron-LM", section 3: `enter` is the
identity forward and a sum backward, `add` a sum forward and the identity backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...capture.splitting.layout import Shard
from ...capture.splitting.rewrite import Exchange, join_parts, take_part
from ..random_state import RandomState


class ShardGroup:
    """The ranks that share a stage, connected after the stage was built."""

    def __init__(self, shard: int, degree: int, device: torch.device) -> None:
        self.shard, self.degree, self._device = shard, degree, device
        self._group: dist.ProcessGroup | None = None
        self._random: RandomState | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Use a process group, in which ranks are numbered by shard."""
        self._group = group

    def exchange(self) -> Exchange:
        """Return the functions that a split program calls."""
        return Exchange(
            self.shard,
            self.degree,
            self.enter,
            self.add,
            self.make_gather,
            self.draw_apart,
            self.draw_alike,
        )

    def enter(self, value: Tensor) -> Tensor:
        """Return a whole value; its gradient becomes the sum of those of all ranks."""
        found: Tensor = _Enter.apply(value, self)  # type: ignore[no-untyped-call]
        return found

    def add(self, value: Tensor) -> Tensor:
        """Return the sum of a value over the ranks."""
        found: Tensor = _Add.apply(value, self)  # type: ignore[no-untyped-call]
        return found

    def make_gather(self, layout: Shard) -> Callable[[Tensor], Tensor]:
        """Return the function that joins the ranks' parts of a value."""

        def gather(value: Tensor) -> Tensor:
            found: Tensor = _Gather.apply(value, self, layout)  # type: ignore[no-untyped-call]
            return found

        return gather

    def draw_apart(self) -> None:
        """Give each rank random numbers of its own; `draw_alike` goes back to equal ones."""
        # Drawn from the generator of the CPU, which is equal on all ranks: no wait for a GPU.
        number = int(torch.randint(2**62, ()))
        self._random = RandomState.now(self._device)
        torch.manual_seed(number + self.shard)
        random.seed(number + self.shard)

    def draw_alike(self) -> None:
        """End `draw_apart`."""
        assert self._random is not None
        self._random.restore(self._device)
        self._random = None

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, which have it in equal shapes."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def collect(self, value: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by shard; they have equal shapes."""
        own = value.contiguous()
        found = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(found, own, group=self._group)
        return found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup) -> Tensor:
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: Shard) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return join_parts(group.collect(value), layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group, layout = ctx.group, ctx.layout
        own = take_part(gradient, layout.dim, layout.parts, group.shard, group.degree)
        return own, None, None
