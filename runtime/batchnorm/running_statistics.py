"""Running statistics of normalisation, where a batch is several micro-batches.

Every micro-batch is normalised by its own statistics, as it would be in a loop over micro-batches
on one device, unless replicas are to normalise together. What is left to choose is how the running
statistics, used in evaluation, move:

``microbatch``
    Once for each micro-batch, in their order, as that loop moves them. Replicas of a stage tell
    each other what their micro-batches' statistics were, and all move alike.
``deferred``
    Once a step, by the statistics of the whole batch, as a model that sees the batch at once moves
    them (torchgpipe's deferred batch normalisation, but with the unbiased variance of torch).
``synchronised``
    Replicas of a stage normalise together, and move them once a round: see `synchronised`.

Instance normalisation, where it keeps running statistics, moves them by the mean over instances of
each one's mean and variance, and counts no batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from ...capture.program.mutation import mutated_inputs
from ...capture.program.program import Program, resolve
from ...capture.program.segment import Segment
from ...core.errors import InvalidInput, PlanMismatch
from ..ranks.collective import Collective, Work

BatchStatistics = Literal["microbatch", "deferred", "synchronised"]


def check_policy(policy: BatchStatistics) -> BatchStatistics:
    """A policy as it is.

    Raises:
        InvalidInput: There is no such policy.
    """
    if policy not in get_args(BatchStatistics):
        raise InvalidInput(
            f"batch_statistics is {policy!r}; give one of {', '.join(get_args(BatchStatistics))}"
        )
    return policy


class Statistics(Protocol):
    """What a policy does in a step of one stage."""

    def begin(self) -> None:
        """A step begins."""

    def of(self, microbatch: int) -> AbstractContextManager[None]:
        """Inside, the stage runs forward on this micro-batch."""

    def again(self, microbatch: int) -> AbstractContextManager[None]:
        """Inside, it does so a second time; its buffers are put back afterwards."""

    def share(self) -> None:
        """The last forward of the step was done here; tell the other replicas."""

    def finish(self) -> None:
        """Move the running statistics by all micro-batches of the step."""


@dataclass
class _Norm:
    """One normalising module while a step runs.

    Attributes:
        module: Its buffers hold a micro-batch's share alone until the step ends.
        begun: Running mean, running variance and count of batches before the step.
        samples: Values of each channel in the micro-batch at work; of instance normalisation
            its instances.
        uses: How often it ran in this micro-batch's forward.
    """

    name: str
    module: Any
    begun: tuple[Tensor, Tensor, int]
    samples: int = 0
    uses: int = 0

    @property
    def of_instances(self) -> bool:
        return isinstance(self.module, _InstanceNorm)

    def factor(self, count: int) -> float:
        """The weight of a batch's statistics if it is the so manieth.

        Without a momentum a cumulative average; instance normalisation then does not move.
        """
        if self.module.momentum is not None:
            return float(self.module.momentum)
        return 0.0 if self.of_instances else 1 / count

    def saw(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook."""
        self.uses += 1
        values = args[0]
        if isinstance(module, _InstanceNorm):
            without_batch = module._get_no_batch_dim()
            self.samples = 1 if values.dim() == without_batch else values.shape[0]
        else:
            self.samples = values.numel() // values.shape[1]


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
        together: The replicas, if there are several.
    """

    def __init__(
        self,
        stage: nn.Module,
        policy: BatchStatistics,
        num_microbatches: int,
        replicas: int,
        place: int,
        together: Collective | None,
    ) -> None:
        self._stage, self._policy = stage, policy
        self._num_microbatches, self._replicas = num_microbatches, replicas
        self._place, self._together = place, together
        self._norms: list[_Norm] = []
        self._shares: dict[int, Tensor] = {}
        self._gathered: tuple[list[Tensor], Work] | None = None

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
            norm.samples = norm.uses = 0
            norm.module.running_mean.data.zero_()
            norm.module.running_var.data.zero_()
            _set_count(norm, norm.begun[2] + microbatch)
            handles.append(norm.module.register_forward_pre_hook(norm.saw))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._norms:
            shares = [self._share(norm, microbatch) for norm in self._norms]
            self._shares[microbatch] = torch.cat(shares)

    def again(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def share(self) -> None:
        """The last forward of the step was done here; tell the other replicas."""
        if not self._norms or self._together is None:
            return
        most = -(-self._num_microbatches // self._replicas)
        # A replica may have seen no micro-batch, and still has to send as much as the others.
        width = sum(2 * norm.module.running_mean.numel() + 1 for norm in self._norms)
        mine = torch.zeros(most, width, dtype=torch.float64)
        for microbatch, share in self._shares.items():
            mine[microbatch // self._replicas] = share
        self._gathered = self._together.gather(mine.to(self._norms[0].module.running_mean.device))

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
            used = part[:, -1] > 0
            if not used.any():
                self._restore(norm)
                continue
            if not used.all():
                raise InvalidInput(
                    f"{norm.name} runs in some micro-batches of a step and not in others; its "
                    "running statistics cannot be moved for several replicas or deferred: plan "
                    "without replicas of its stage (max_replicas=1), and with "
                    "batch_statistics='microbatch'"
                )
            mean, variance = self._moved(norm, part, width)
            norm.module.running_mean.data.copy_(mean)
            norm.module.running_var.data.copy_(variance)
            _set_count(norm, norm.begun[2] + self._steps)

    def _restore(self, norm: _Norm) -> None:
        """A module that the stage holds and does not call."""
        norm.module.running_mean.data.copy_(norm.begun[0])
        norm.module.running_var.data.copy_(norm.begun[1])
        _set_count(norm, norm.begun[2])

    @property
    def _steps(self) -> int:
        return 1 if self._policy == "deferred" else self._num_microbatches

    def _share(self, norm: _Norm, microbatch: int) -> Tensor:
        module = norm.module
        if norm.uses > 1:
            raise InvalidInput(
                f"{norm.name} is used {norm.uses} times in one forward; its running statistics "
                "cannot be moved for several replicas or deferred: plan without replicas of its "
                "stage (max_replicas=1), and with batch_statistics='microbatch'"
            )
        values = [module.running_mean, module.running_var, torch.tensor([float(norm.samples)])]
        return torch.cat([value.detach().double().cpu() for value in values])

    def _all_shares(self) -> Tensor:
        """One row a micro-batch, of all replicas, in the order of micro-batches."""
        if self._gathered is None:
            return torch.stack([self._shares[k] for k in range(self._num_microbatches)])
        found, work = self._gathered
        work.wait()
        self._gathered = None
        rows = [part.cpu() for part in found]
        return torch.stack(
            [rows[k % self._replicas][k // self._replicas] for k in range(self._num_microbatches)]
        )

    def _moved(self, norm: _Norm, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The running mean and variance after the step."""
        mean, variance, count = norm.begun
        if self._policy == "deferred":
            factor = norm.factor(count + 1)
            of_batch = _of_batch(norm, rows, width, count)
            return (
                (1 - factor) * mean + factor * of_batch[0].to(mean),
                (1 - factor) * variance + factor * of_batch[1].to(variance),
            )
        for number, row in enumerate(rows):
            kept = 1 - norm.factor(count + number + 1)
            mean = kept * mean + row[:width].to(mean)
            variance = kept * variance + row[width : 2 * width].to(variance)
        return mean, variance


def _of_batch(norm: _Norm, rows: Tensor, width: int, count: int) -> Sequence[Tensor]:
    """Mean and unbiased variance of the batch from those of its micro-batches."""
    factors = torch.tensor(
        [norm.factor(count + number + 1) for number in range(len(rows))], dtype=torch.float64
    )
    samples = rows[:, -1:]
    total = samples.sum()
    if norm.of_instances:
        moments = rows[:, : 2 * width] / factors[:, None] if factors.all() else rows[:, : 2 * width]
        weighted = (moments * samples).sum(0) / total
        return weighted[:width], weighted[width:]
    means = rows[:, :width] / factors[:, None]
    biased = rows[:, width : 2 * width] / factors[:, None] * (samples - 1) / samples
    mean = (means * samples).sum(0) / total
    squares = ((biased + means**2) * samples).sum(0) / total
    return mean, (squares - mean**2) * total / (total - 1)


def _moving(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of a stage that keep running statistics."""
    for name, module in stage.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield name, module


def _count(norm: Any) -> int:
    return 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)


def _set_count(norm: _Norm, count: int) -> None:
    if norm.module.num_batches_tracked is not None and not norm.of_instances:
        norm.module.num_batches_tracked.data.fill_(count)


def check_statistics_reachable(program: Program, stages: Iterable[Segment]) -> None:
    """See that in these stages running statistics are moved by modules alone.

    Args:
        program: The captured model.
        stages: Those that several replicas share, or whose statistics are deferred.

    Raises:
        PlanMismatch: Operations move some; the message names their module.
    """
    held = {path for stage in stages for path, _ in stage.named_modules()}
    for node in program.graph.nodes:
        changed = mutated_inputs(node, program) if node.op == "call_function" else []
        for path in filter(None, (_norm_of(each, program) for each in changed)):
            if path in held:
                found = type(resolve(program.model, path)).__name__
                raise PlanMismatch(
                    f"{path} ({found}) was captured as single operations, whose running statistics "
                    "cannot be deferred, nor shared by replicas; use torch.nn's own class there, "
                    "or plan without replicas of its stage (max_replicas=1) and leave out "
                    "batch_statistics"
                )


def _norm_of(node: fx.Node, program: Program) -> str:
    """The path of the module in training that this is the running mean of; empty for others."""
    path, _, name = str(node.target).rpartition(".")
    if node.op != "get_attr" or name != "running_mean":
        return ""
    try:
        module = resolve(program.model, path)
    except AttributeError:
        return ""
    return path if isinstance(module, _NormBase) and module.training else ""
