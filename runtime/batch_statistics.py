"""Running statistics of batch normalisation, where a batch is several micro-batches.

Every micro-batch is normalised by its own statistics, as it would be in a loop over micro-batches
on one device. What is left to choose is how the running statistics, used in evaluation, move:

``microbatch``
    Once for each micro-batch, in their order, as that loop moves them. Replicas of a stage tell
    each other what their micro-batches' statistics were, and all move alike.
``deferred``
    Once a step, by the statistics of the whole batch, as a model that sees the batch at once moves
    them (torchgpipe's deferred batch normalisation, but with the unbiased variance of torch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..core.errors import InvalidInput

BatchStatistics = Literal["microbatch", "deferred"]


def checked_policy(policy: BatchStatistics) -> BatchStatistics:
    """A policy as it is.

    Raises:
        InvalidInput: There is no such policy.
    """
    if policy not in get_args(BatchStatistics):
        raise InvalidInput(
            f"batch_statistics is {policy!r}; give one of {', '.join(get_args(BatchStatistics))}"
        )
    return policy


@dataclass
class _Norm:
    """One normalising module while a step runs.

    Attributes:
        module: Its buffers hold a micro-batch's share alone until the step ends.
        begun: Running mean, running variance and count of batches before the step.
        samples: Values of each channel in the micro-batch at work.
    """

    name: str
    module: Any
    begun: tuple[Tensor, Tensor, int]
    samples: int = 0


class RunningStatistics:
    """Moves the running statistics of one stage when a step ends.

    While a micro-batch runs, the buffers begin at zero, so that afterwards they hold exactly the
    share ``momentum * statistics`` by which it moves them: (1 - momentum) 0 + momentum * new.
    They are written behind autograd's back, as batch normalisation itself writes them: backwards
    that are still to come have saved them, and do not read them.

    Args:
        stage: The module whose normalising layers are meant.
        policy: See above.
        num_microbatches: Of a step.
        replicas: Ranks of the stage; micro-batch k is done by entry k mod length.
        place: This rank's among them.
        group: The replicas, if there are several.
    """

    def __init__(
        self,
        stage: nn.Module,
        policy: BatchStatistics,
        num_microbatches: int,
        replicas: int,
        place: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._stage, self._policy = stage, policy
        self._num_microbatches, self._replicas = num_microbatches, replicas
        self._place, self._group = place, group
        self._norms: list[_Norm] = []
        self._shares: dict[int, Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether a loop over micro-batches here would not do."""
        moves = any(True for _ in _moving(self._stage))
        return moves and (self._policy == "deferred" or self._replicas > 1)

    def begin(self) -> None:
        """A step begins."""
        self._shares = {}
        self._norms = [
            _Norm(name, norm, (norm.running_mean.clone(), norm.running_var.clone(), _count(norm)))
            for name, norm in _moving(self._stage)
            if norm.training
        ]

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Inside, the stage runs forward on this micro-batch."""
        handles = []
        for norm in self._norms:
            norm.samples = 0
            norm.module.running_mean.data.zero_()
            norm.module.running_var.data.zero_()
            _set_count(norm.module, norm.begun[2] + microbatch)
            handles.append(norm.module.register_forward_pre_hook(_counting(norm)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._norms:
            shares = [self._share(norm, microbatch) for norm in self._norms]
            self._shares[microbatch] = torch.cat(shares)

    def finish(self) -> None:
        """Move the running statistics by all micro-batches of the step."""
        if not self._norms:
            return
        rows = self._all_shares()
        at = 0
        for norm in self._norms:
            width = norm.module.running_mean.numel()
            part = rows[:, at : at + 2 * width + 1]
            at += 2 * width + 1
            mean, variance = self._moved(norm, part, width)
            norm.module.running_mean.data.copy_(mean)
            norm.module.running_var.data.copy_(variance)
            _set_count(norm.module, norm.begun[2] + self._steps)

    @property
    def _steps(self) -> int:
        return 1 if self._policy == "deferred" else self._num_microbatches

    def _share(self, norm: _Norm, microbatch: int) -> Tensor:
        module = norm.module
        uses = _count(module) - norm.begun[2] - microbatch
        if module.num_batches_tracked is not None and uses > 1:
            raise InvalidInput(
                f"{norm.name} is used {uses} times in one forward; its running statistics cannot "
                "be moved for several replicas or deferred: plan without replicas of its stage "
                "(max_replicas=1), and with batch_statistics='microbatch'"
            )
        values = [module.running_mean, module.running_var, torch.tensor([float(norm.samples)])]
        return torch.cat([value.detach().double().cpu() for value in values])

    def _all_shares(self) -> Tensor:
        """One row a micro-batch, of all replicas, in the order of micro-batches."""
        if self._group is None:
            return torch.stack([self._shares[k] for k in range(self._num_microbatches)])
        device = self._norms[0].module.running_mean.device
        most = -(-self._num_microbatches // self._replicas)
        width = next(iter(self._shares.values())).numel()
        mine = torch.zeros(most, width, dtype=torch.float64)
        for microbatch, share in self._shares.items():
            mine[microbatch // self._replicas] = share
        mine = mine.to(device)
        found = [torch.empty_like(mine) for _ in range(self._replicas)]
        dist.all_gather(found, mine, group=self._group)
        rows = [part.cpu() for part in found]
        return torch.stack(
            [rows[k % self._replicas][k // self._replicas] for k in range(self._num_microbatches)]
        )

    def _moved(self, norm: _Norm, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The running mean and variance after the step."""
        mean, variance, count = norm.begun
        if self._policy == "deferred":
            factor = _factor(norm.module, count + 1)
            of_batch = _of_batch(norm, rows, width, count)
            return (
                (1 - factor) * mean + factor * of_batch[0].to(mean),
                (1 - factor) * variance + factor * of_batch[1].to(variance),
            )
        for number, row in enumerate(rows):
            kept = 1 - _factor(norm.module, count + number + 1)
            mean = kept * mean + row[:width].to(mean)
            variance = kept * variance + row[width : 2 * width].to(variance)
        return mean, variance


def _of_batch(norm: _Norm, rows: Tensor, width: int, count: int) -> Sequence[Tensor]:
    """Mean and unbiased variance of the batch from those of its micro-batches."""
    factors = torch.tensor(
        [_factor(norm.module, count + number + 1) for number in range(len(rows))]
    ).double()
    samples = rows[:, -1:]
    means = rows[:, :width] / factors[:, None]
    biased = rows[:, width : 2 * width] / factors[:, None] * (samples - 1) / samples
    total = samples.sum()
    mean = (means * samples).sum(0) / total
    squares = ((biased + means**2) * samples).sum(0) / total
    return mean, (squares - mean**2) * total / (total - 1)


def _moving(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of a stage that keep running statistics."""
    for name, module in stage.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield name, module


def _counting(norm: _Norm) -> Any:
    """A hook that notes how many values a channel has."""

    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        norm.samples = args[0].numel() // args[0].shape[1]

    return count


def _count(norm: Any) -> int:
    return 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)


def _set_count(norm: Any, count: int) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.data.fill_(count)


def _factor(norm: Any, count: int) -> float:
    """The weight of a batch's statistics; a cumulative average where there is no momentum."""
    return 1 / count if norm.momentum is None else float(norm.momentum)
