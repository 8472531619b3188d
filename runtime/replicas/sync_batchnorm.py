"""Synchronised batch normalisation over the replicas of a stage.

Micro-batches are dealt to replicas in turn: with R replicas, micro-batches R k to R k + R - 1 form
round k. Under the policy ``synchronised`` a round is normalised by its common mean and variance, in
the forward and in the backward, as `torch.nn.SyncBatchNorm` does over data-parallel ranks. So a
stage computes what one device would that is given R micro-batches at a time. Stages without
replicas normalise each micro-batch.

Replicas therefore synchronise in every forward and backward. `check_synchronised` makes sure that
they have equal work in the same order, and that this cannot deadlock.
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
from .deadlock_check import are_equal, can_finish, list_rounds
from .strategy import NonDefaultStrategy, split_by_synchronisation


class SynchronisedStatistics:
    """The policy ``synchronised``: normalises a stage by the statistics of all its replicas."""

    def __init__(self, stage: nn.Module, together: Collective) -> None:
        self._norms, self._together = list(_norms(stage)), together

    def begin(self) -> None:
        """Do nothing: no state is kept between forwards."""

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Normalise over all replicas in the forward inside, which all of them run."""
        try:
            # An instance attribute shadows the class's `forward`, so the module keeps its type.
            for norm in self._norms:
                vars(norm)["forward"] = partial(_forward, norm, self._together)
            yield
        finally:
            for norm in self._norms:
                vars(norm).pop("forward", None)

    again = of
    """Recomputed forwards communicate again: every replica recomputes the same round."""

    def share(self) -> None:
        """Do nothing: all replicas have computed the same statistics."""

    def finish(self) -> None:
        """Do nothing: running statistics have moved, once per round."""


class _Sum(torch.autograd.Function):
    """Sum over replicas, whose gradient is the sum of the replicas' gradients."""

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
    """Compute a batch-norm layer over all replicas; ``values`` has shape (N, C, ...).

    Two sums are communicated: of values and counts for the mean, then of squared deviations. One
    sum of values and squares would suffice but cancels for a mean far from zero.
    """
    if not norm.training:
        result: Tensor = type(norm).forward(norm, values)
        return result
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    dims = [dim for dim in range(values.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(values.dim())]
    # Filled on the device: the host would wait for a copy of the number.
    here = wide.new_full((1,), values.numel() // values.shape[1])
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
    """Move the running statistics through ``.data``, uncounted by autograd, as torch does.

    Backwards of earlier micro-batches have saved these buffers, without reading them. A counted
    change would make them fail.
    """
    if norm.running_mean is None:
        return
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.data.add_(1)
    factor = norm.momentum
    if factor is None:  # on its device: the host would wait to read it
        factor = norm.num_batches_tracked.to(norm.running_mean.dtype).reciprocal()
    norm.running_mean.data.lerp_(mean.to(norm.running_mean.dtype), factor)
    norm.running_var.data.lerp_(variance.to(norm.running_var.dtype), factor)


def check_synchronised(
    stages: Sequence[nn.Module], schedule: Schedule, chosen: Mapping[int, NonDefaultStrategy]
) -> None:
    """Check that the policy ``synchronised`` cannot deadlock with the chosen strategies."""
    synchronised = {
        stage
        for stage, ranks in enumerate(schedule.stage_ranks)
        if len(ranks) > 1 and any(True for _ in _norms(stages[stage]))
    }
    for stage in sorted(synchronised):
        if not are_equal(list_rounds(schedule, stage)):
            raise PlanMismatch(
                f"the batch statistics of stage {stage} cannot be synchronised: its "
                f"{len(schedule.stage_ranks[stage])} replicas share {schedule.num_microbatches} "
                "micro-batches, of which some have more, or work in another order; use "
                "batch_statistics='microbatch', or a number of micro-batches that they divide"
            )
    every, last = split_by_synchronisation(chosen)
    every |= synchronised
    if synchronised and not can_finish(schedule, every, last - synchronised):
        raise PlanMismatch(
            f"with synchronised batch statistics the replicas of stages {sorted(synchronised)} "
            "would deadlock in this schedule; use batch_statistics='microbatch', plan with "
            "--schedule gpipe, or use equal numbers of replicas for all stages"
        )


def check_no_sync_batch_norm(model: nn.Module) -> None:
    """Check that a model has no `torch.nn.SyncBatchNorm`, which knows nothing of stages."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InvalidInput(
                f"{name or 'the model'} is an nn.SyncBatchNorm, which would wait for ranks of "
                "other stages; use nn.BatchNorm and, for statistics over the replicas of a stage, "
                "batch_statistics='synchronised'"
            )


def _norms(stage: nn.Module) -> Iterable[_BatchNorm]:
    return (module for module in stage.modules() if isinstance(module, _BatchNorm))
