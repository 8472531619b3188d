"""Exchange of values and gradients between the ranks that share a stage.

Conjugate operations: what one does in the forward, its partner does in the backward. `enter` and
`add` are those of Shoeybi et al. 2019, "Megatron-LM", section 3; `gather_entered` and `add_part`
those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2.2; `take` and `gather` lead from whole values to parts of them and back.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...capture.splitting.layout import Shard
from ...capture.splitting.rewrite import Exchange, join_parts, take_part
from ...core.errors import InvalidInput
from ..random_state import RandomState

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Torch's, which 2.13 has renamed."""


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
            rank=self.shard,
            degree=self.degree,
            enter=self._bind(_Enter),
            take=lambda layout: self._bind(_Take, layout),
            add=self._bind(_Add),
            add_part=lambda layout: self._bind(_AddPart, layout),
            gather=lambda layout: self._bind(_Gather, layout),
            gather_entered=lambda layout: self._bind(_GatherEntered, layout),
            draw_apart=self.draw_apart,
            draw_alike=self.draw_alike,
        )

    def _bind(
        self, function: type[torch.autograd.Function], layout: Shard | None = None
    ) -> Callable[[Tensor], Tensor]:
        def exchange(value: Tensor) -> Tensor:
            made: Tensor = function.apply(value, self, layout)
            return made

        exchange.__name__ = function.__name__.strip("_")
        return exchange

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

    @contextmanager
    def check_equal_draws(self) -> Iterator[None]:
        """Raise `InvalidInput` if a loss inside draws numbers that differ between the ranks."""
        before = self._read_generators()
        yield
        drawn = [
            state
            for state, now in zip(before, self._read_generators(), strict=True)
            if state != now
        ]
        if not drawn:
            return
        digest = int.from_bytes(hashlib.blake2b(pickle.dumps(drawn), digest_size=7).digest())
        largest, smallest = self.maximum(
            torch.tensor([digest, -digest], device=self._device)
        ).tolist()
        if largest != -smallest:
            raise InvalidInput(
                "the loss draws random numbers, and ranks that share the last stage draw different "
                "ones: their gradients would be of different losses; seed torch, random and numpy "
                "equally on these ranks, let the loss draw from a torch.Generator of its own with "
                "an equal seed, or plan with --tensor 1"
            )

    def _read_generators(self) -> list[Any]:
        """Return the states of torch's, Python's, numpy's and the device's generators."""
        state = RandomState.now(self._device)
        assert state.cpu is not None
        of_torch, others = state.cpu
        on_device = None if state.device is None else state.device.numpy().tobytes()
        return [of_torch.numpy().tobytes(), *others, on_device]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, which have it in equal shapes."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def maximum(self, value: Tensor) -> Tensor:
        """Return the largest of the ranks' values, by element."""
        largest = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest

    def sum_part(self, value: Tensor, layout: Shard) -> Tensor:
        """Return this rank's part of the sum of a tensor over the ranks."""
        parts = [
            take_part(value, layout.dim, layout.parts, shard, self.degree)
            for shard in range(self.degree)
        ]
        total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(total, torch.cat(parts), group=self._group)
        return total

    def take(self, value: Tensor, layout: Shard) -> Tensor:
        """Return this rank's part of a tensor."""
        return take_part(value, layout.dim, layout.parts, self.shard, self.degree)

    def join(self, value: Tensor, layout: Shard) -> Tensor:
        """Return the whole tensor of which each rank holds a part."""
        own = value.contiguous()
        found = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(found, own, group=self._group)
        return join_parts(found, layout)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: None) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.sum(gradient), None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: None) -> Tensor:
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: Shard) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return group.take(value, layout).clone()  # a part of its own: the whole is freed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.join(gradient, ctx.layout), None, None


class _AddPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: Shard) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return group.sum_part(value, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.join(gradient, ctx.layout), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: Shard) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return group.join(value, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.take(gradient, ctx.layout), None, None


class _GatherEntered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ShardGroup, layout: Shard) -> Tensor:
        ctx.group, ctx.layout = group, layout
        return group.join(value, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.sum_part(gradient, ctx.layout), None, None
