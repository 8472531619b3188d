"""Replica strategy that lets torch's ``DistributedDataParallel`` sum a stage's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...core.plan.schedule import Work
from .gradient_sync import register_accumulation_hook
from .replication import StageStrategy
from .sharded import has_gradient_anywhere


class DdpStage(StageStrategy):
    """Stage whose gradients DistributedDataParallel reduces in a step's last backward.

    DistributedDataParallel wraps the weights alone and never runs a forward. Its reducer is armed
    before the last backward, as ``torch.distributed.pipelining`` does it too.

    The weights are trainable, of one stage, and in the same order on every replica.
    """

    def __init__(self, weights: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._weights, self._group = list(weights), group
        self._replicas = dist.get_world_size(group)
        self._ddp = DistributedDataParallel(nn.ParameterList(self._weights), process_group=group)
        # A lambda, because it has no annotations: torch compares a hook's annotations with types,
        # and those of this module are strings.
        self._ddp.register_comm_hook(group, lambda group, bucket: _sum(group, bucket.buffer()))
        self._sums, self._is_summed = False, True
        self._missing: dict[int, nn.Parameter] = {}
        self._had_one: list[bool] = []
        for weight in self._weights:
            register_accumulation_hook(weight, self._accumulated)

    def begin(self, *, trains: bool, sums: bool) -> None:
        self._sums = sums
        # What `.grad` holds already was summed: each replica keeps its share, as in
        # `GradientSync`, so that it is not counted once per replica.
        if trains and self._is_summed:
            for weight in self._weights:
                if weight.grad is not None:
                    weight.grad /= self._replicas
            self._is_summed = False

    def action_begins(self, work: Work, *, last: bool) -> None:
        if last and self._sums:
            self._missing = {id(weight): weight for weight in self._weights}
            reducer: Any = self._ddp.reducer
            reducer.prepare_for_backward([])

    def action_ended(self, work: Work, *, last: bool) -> None:
        if not (last and self._sums):
            return
        self._had_one = [
            id(weight) not in self._missing or weight.grad is not None for weight in self._weights
        ]
        # The reducer waits for every weight. Those that this backward did not reach get a gradient
        # of zeros by a backward from the weights themselves; `finish` removes it again if no
        # replica has one.
        if self._missing:
            unreached = list(self._missing.values())
            torch.autograd.backward(unreached, [w.new_zeros(()).expand_as(w) for w in unreached])

    def finish(self) -> None:
        if not self._sums:
            return
        self._is_summed = True
        had_one = has_gradient_anywhere(self._had_one, self._group, self._weights[0].device)
        for weight, keeps in zip(self._weights, had_one, strict=True):
            if not keeps:
                weight.grad = None

    def sums(self, weight: Tensor) -> bool:
        return any(weight is own for own in self._weights)

    def _accumulated(self, weight: Tensor) -> None:
        self._missing.pop(id(weight), None)


def _sum(group: dist.ProcessGroup, bucket: Tensor) -> torch.futures.Future[Tensor]:
    """Sum a bucket; without a hook DistributedDataParallel would take the mean."""
    work: Any = dist.all_reduce(bucket, group=group, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed
