"""Batch normalisation over all replicas of a stage: a round of micro-batches is normalised as one.

Replicas are dealt micro-batches in turn. Of R replicas, micro-batches R k to R k + R - 1 are at
work in the k-th round, one on each, and under the policy ``synchronised`` their mean and variance
are those of all of them, in the forward and in the backward, as `torch.nn.SyncBatchNorm` has it
for the ranks of data parallelism. So a stage computes what it would on one device that is given R
micro-batches at a time. Stages without replicas normalise by micro-batch.

Replicas therefore meet in every forward and backward; `check_synchronised` sees to it that each
has as much to do, in one order, and that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.schedule import Schedule
from ..ranks.collective import Collective
from .deadlock_check import can_finish, describe_imbalance
from .strategy import NonDefaultStrategy


class SynchronisedStatistics:
    """Lets a stage's batch normalisation see what all replicas see.

    Args:
        stage: The module whose normalising layers are meant.
        together: The replicas.
    """

    def __init__(self, stage: nn.Module, together: Collective) -> None:
        self._norms, self._together = list(_norms(stage)), together

    def begin(self) -> None:
        """A step begins."""

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Inside, the stage runs forward; the other replicas do so too."""
        try:
            for norm in self._norms:
                vars(norm)["forward"] = partial(_forward, norm, self._together)
            yield
        finally:
            for norm in self._norms:
                vars(norm).pop("forward", None)

    again = of
    """Inside, a forward is computed a second time."""

    def share(self) -> None:
        """All replicas know the same already."""

    def finish(self) -> None:
        """The running statistics have moved, once a round."""


class _Sum(torch.autograd.Function):
    """The sum over replicas; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, together: Collective) -> Tensor:
        ctx.together = together
        return _summed(value, together)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.together), None


def _summed(value: Tensor, together: Collective) -> Tensor:
    total = value.detach().clone(memory_format=torch.contiguous_format)
    together.sum(total).wait()
    return total


def _forward(norm: Any, together: Collective, values: Tensor) -> Tensor:
    """What the module computes, by the statistics of all replicas; values are (N, C, ...)."""
    if not norm.training:
        result: Tensor = type(norm).forward(norm, values)
        return result
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    dims = [dim for dim in range(values.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(values.dim())]
    here = wide.new_tensor([values.numel() // values.shape[1]])
    sums = _Sum.apply(torch.cat([wide.sum(dims), here]), together)  # type: ignore[no-untyped-call]
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(shape)
    squares = _Sum.apply(centred.square().sum(dims), together)  # type: ignore[no-untyped-call]
    variance = squares / count
    _move(norm, mean.detach(), squares.detach() / (count - 1))
    made: Tensor = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        made = made * norm.weight.view(shape) + norm.bias.view(shape)
    return made.to(values.dtype)


def _move(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """The running statistics, behind autograd's back as torch moves them."""
    if norm.running_mean is None:
        return
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.data.add_(1)
    factor = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)
    norm.running_mean.data.lerp_(mean.to(norm.running_mean.dtype), factor)
    norm.running_var.data.lerp_(variance.to(norm.running_var.dtype), factor)


def check_synchronised(
    stages: Sequence[nn.Module], schedule: Schedule, chosen: Mapping[int, NonDefaultStrategy]
) -> None:
    """Refuse the policy where replicas would wait for each other for ever.

    Args:
        stages: All of the plan.
        schedule: Which ranks hold which stage, and in which order they work.
        chosen: What replicas do besides; see `strategies.choice.choose`.

    Raises:
        PlanMismatch: Saying why, and what can be done.
    """
    meet = {
        stage
        for stage, ranks in enumerate(schedule.stage_ranks)
        if len(ranks) > 1 and any(True for _ in _norms(stages[stage]))
    }
    for stage in sorted(meet):
        if why := describe_imbalance(schedule, stage):
            raise PlanMismatch(
                f"the batch statistics of stage {stage} cannot be synchronised: {why}; use "
                "batch_statistics='microbatch', or as many micro-batches for every replica"
            )
    every = {s for s, asked in chosen.items() if asked != "ddp" and asked.synchronises_in_actions}
    last = {stage for stage, asked in chosen.items() if asked == "ddp"} - meet
    if meet and not can_finish(schedule, meet | every, last):
        raise PlanMismatch(
            f"with synchronised batch statistics the replicas of stages {sorted(meet)} would wait "
            "for each other for ever in this schedule; use batch_statistics='microbatch', plan "
            "with --schedule gpipe, or with as many replicas for every stage"
        )


def check_no_sync_batch_norm(model: nn.Module) -> None:
    """Refuse torch's own, which does not know of stages.

    Raises:
        InvalidInput: Naming the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InvalidInput(
                f"{name or 'the model'} is an nn.SyncBatchNorm, which waits for ranks that hold "
                "other stages; give the pipeline nn.BatchNorm and, for statistics over the "
                "replicas of a stage, batch_statistics='synchronised'"
            )


def _norms(stage: nn.Module) -> Iterable[_BatchNorm]:
    return (module for module in stage.modules() if isinstance(module, _BatchNorm))
