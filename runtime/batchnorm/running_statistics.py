"""Policies for the running statistics of normalisation layers under micro-batches and replicas.

Each micro-batch is normalised by its own statistics, as in a loop over micro-batches on one device
(``synchronised`` excepted). The policy says how the running statistics, used in evaluation, move:

``microbatch``
    Once per micro-batch, in their order, as in that loop. Replicas of a stage exchange the
    statistics of their micro-batches, so that all of them move alike.
``deferred``
    Once per step, by the statistics of the whole batch, as in a model that sees the batch at once
    (torchgpipe's deferred batch normalisation, but with the unbiased variance that torch uses).
``synchronised``
    Replicas of a stage normalise together and move the statistics once per round; see
    `runtime.replicas.sync_batchnorm`.

Instance normalisation with running statistics moves them by the mean, over instances, of each
instance's mean and variance, and counts no batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from ...capture.program.mutation import mutated_inputs
from ...capture.program.program import Program, find_module
from ...capture.program.segment import Segment
from ...core.errors import InvalidInput, PlanMismatch
from ..ranks.collective import Collective, Pending

BatchStatistics = Literal["microbatch", "deferred", "synchronised"]


def check_policy(policy: BatchStatistics) -> BatchStatistics:
    """Return a policy after checking that it exists."""
    if policy not in get_args(BatchStatistics):
        raise InvalidInput(
            f"batch_statistics is {policy!r}; give one of {', '.join(get_args(BatchStatistics))}"
        )
    return policy


Flags = tuple[Tensor, Callable[[Sequence[bool]], None]]
"""Flags on the device, and what to call with them once the host reads values anyway."""


class Statistics(Protocol):
    """Interface of a policy during the steps of one stage."""

    def begin(self) -> None:
        """Begin a step."""

    def of(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context for a micro-batch's forward."""

    def again(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context for a recomputed forward, after which buffers are restored."""

    def share(self) -> None:
        """Begin to exchange statistics with the other replicas, after the step's last forward."""

    def finish(self) -> Flags | None:
        """Move the running statistics by all micro-batches of the step; return what to check."""


@dataclass
class _NormLayer:
    """One normalisation layer during a step.

    Attributes:
        module: The layer, whose buffers hold only a micro-batch's share until the step ends.
        begun: Running mean, running variance and count of batches before the step, on the device:
            reading the count would make the host wait for the stage.
        samples: Values per channel in the current micro-batch; for instance normalisation its
            instances.
        uses: Number of the layer's calls in the current forward.
    """

    name: str
    module: Any
    begun: tuple[Tensor, Tensor, Tensor]
    samples: int = 0
    uses: int = 0

    @property
    def of_instances(self) -> bool:
        return isinstance(self.module, _InstanceNorm)

    def factor(self, count: Tensor) -> float | Tensor:
        """Return the weight of the statistics of batches number ``count``.

        Without a momentum that is a cumulative average's weight; instance normalisation then does
        not move.
        """
        if self.module.momentum is not None:
            return float(self.module.momentum)
        return 0.0 if self.of_instances else 1 / count.double()

    def set(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Set the running statistics."""
        self.module.running_mean.data.copy_(mean)
        self.module.running_var.data.copy_(variance)
        self.set_count(count)

    def set_count(self, count: Tensor) -> None:
        if self.module.num_batches_tracked is not None and not self.of_instances:
            self.module.num_batches_tracked.data.copy_(count)

    def observe(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count a call and its samples (a forward pre-hook)."""
        self.uses += 1
        values = args[0]
        if isinstance(module, _InstanceNorm):
            without_batch = module._get_no_batch_dim()
            self.samples = 1 if values.dim() == without_batch else values.shape[0]
        else:
            self.samples = values.numel() // values.shape[1]


class RunningStatistics:
    """Running statistics of one stage, moved at the end of a step.

    Buffers are zeroed before each forward. A forward sets them to (1 - momentum) * old + momentum *
    new, so afterwards they hold exactly ``momentum * new``, the micro-batch's share, whatever the
    layer computes. From the shares of all micro-batches, on whichever replica they ran, the
    statistics after the step follow.

    The policy is ``microbatch`` or ``deferred``. Replica k mod ``replicas`` runs micro-batch k;
    ``together`` are the replicas, if there are several.
    """

    def __init__(
        self,
        stage: nn.Module,
        policy: BatchStatistics,
        num_microbatches: int,
        replicas: int,
        together: Collective | None,
    ) -> None:
        self._stage, self._policy = stage, policy
        self._num_microbatches, self._replicas = num_microbatches, replicas
        self._together = together
        self._norms: list[_NormLayer] = []
        self._shares: dict[int, Tensor] = {}
        self._gathered: tuple[list[Tensor], Pending] | None = None

    @property
    def is_needed(self) -> bool:
        """Return True if the layers' own updates would differ from the policy."""
        has_statistics = any(True for _ in _layers_with_statistics(self._stage))
        return has_statistics and (self._policy == "deferred" or self._replicas > 1)

    def begin(self) -> None:
        """Begin a step."""
        self._shares = {}
        self._norms = [
            _NormLayer(
                name, norm, (norm.running_mean.clone(), norm.running_var.clone(), _count(norm))
            )
            for name, norm in _layers_with_statistics(self._stage)
            if norm.training
        ]

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Capture the share by which the forward inside moves the statistics."""
        handles = []
        # Through `.data`, as torch itself writes them: backwards of micro-batches in flight have
        # saved these buffers without reading them, and a counted change would make them fail.
        for norm in self._norms:
            norm.samples = norm.uses = 0
            norm.module.running_mean.data.zero_()
            norm.module.running_var.data.zero_()
            norm.set_count(norm.begun[2] + microbatch)
            handles.append(norm.module.register_forward_pre_hook(norm.observe))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._norms:
            shares = [self._share(norm) for norm in self._norms]
            self._shares[microbatch] = torch.cat(shares)

    def again(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def share(self) -> None:
        """Begin to exchange shares with the other replicas, after the step's last forward."""
        if not self._norms or self._together is None:
            return
        most = -(-self._num_microbatches // self._replicas)
        # Gathering needs equal shapes: replicas with fewer micro-batches send rows of zeros.
        width = sum(2 * norm.module.running_mean.numel() + 1 for norm in self._norms)
        device = self._norms[0].module.running_mean.device
        mine = torch.zeros(most, width, dtype=torch.float64, device=device)
        for microbatch, share in self._shares.items():
            mine[microbatch // self._replicas] = share
        self._gathered = self._together.gather(mine)

    def finish(self) -> Flags | None:
        """Move the running statistics by all micro-batches of the step, and return what to check.

        What other replicas ran is on the device alone. So is whether a layer ran at all, and the
        host can read later, with other values, that one ran in some micro-batches only.
        """
        if not self._norms:
            return None
        # Every replica replays the shares of all micro-batches in one order, so all end up equal to
        # the last bit.
        rows = self._all_shares()
        widths = [norm.module.running_mean.numel() for norm in self._norms]
        parts = rows.split([2 * width + 1 for width in widths], dim=1)
        steps = 1 if self._policy == "deferred" else self._num_microbatches
        is_partial = []
        for norm, width, part in zip(self._norms, widths, parts, strict=True):
            runs = part[:, -1] > 0  # a share ends with its number of samples
            is_used = runs.all()
            is_partial.append(runs.any() & ~is_used)
            mean, variance = (
                # A stage may hold the layer and never call it.
                torch.where(is_used, after, before)
                for after, before in zip(self._moved(norm, part, width), norm.begun, strict=False)
            )
            norm.set(mean, variance, norm.begun[2] + steps * is_used)
        return torch.stack(is_partial), self._refuse_partial

    def _refuse_partial(self, is_partial: Sequence[bool]) -> None:
        for norm, is_wrong in zip(self._norms, is_partial, strict=True):
            if is_wrong:
                raise InvalidInput(
                    f"{norm.name} runs in only some micro-batches of a step, so its running "
                    "statistics can be neither deferred nor shared by replicas: plan without "
                    "replicas of its stage (max_replicas=1) and use batch_statistics='microbatch'"
                )

    def _share(self, norm: _NormLayer) -> Tensor:
        module = norm.module
        if norm.uses > 1:
            raise InvalidInput(
                f"{norm.name} is used {norm.uses} times in one forward, so its running statistics "
                "can be neither deferred nor shared by replicas: plan without replicas of its "
                "stage (max_replicas=1) and use batch_statistics='microbatch'"
            )
        samples = torch.full((1,), float(norm.samples), device=module.running_mean.device)
        values = [module.running_mean, module.running_var, samples]
        return torch.cat([value.detach().double() for value in values])

    def _all_shares(self) -> Tensor:
        """Return the shares of all replicas, one row per micro-batch in their order."""
        if self._gathered is None:
            return torch.stack([self._shares[k] for k in range(self._num_microbatches)])
        rows, work = self._gathered
        work.wait()
        self._gathered = None
        return torch.stack(
            [rows[k % self._replicas][k // self._replicas] for k in range(self._num_microbatches)]
        )

    def _moved(self, norm: _NormLayer, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the running mean and variance after the step."""
        mean, variance, count = norm.begun
        if self._policy == "deferred":
            factor = norm.factor(count + 1)
            batch_mean, batch_variance = _pool_moments(norm, rows, width, count)
            return (
                (1 - factor) * mean + factor * batch_mean.to(mean),
                (1 - factor) * variance + factor * batch_variance.to(variance),
            )
        for number, row in enumerate(rows):
            kept = 1 - norm.factor(count + number + 1)
            mean = kept * mean + row[:width].to(mean)
            variance = kept * variance + row[width : 2 * width].to(variance)
        return mean, variance


def _pool_moments(norm: _NormLayer, rows: Tensor, width: int, count: Tensor) -> Sequence[Tensor]:
    """Return mean and unbiased variance of the batch from the shares of its micro-batches."""
    # Each share is `factor * statistics`; dividing by the factor recovers the statistics.
    factor = norm.factor(count + torch.arange(1, len(rows) + 1, device=count.device))
    factors = factor if isinstance(factor, Tensor) else rows.new_full((len(rows),), factor)
    samples = rows[:, -1:]
    total = samples.sum()
    if norm.of_instances:
        moments = rows[:, : 2 * width]
        if not (isinstance(factor, float) and factor == 0):
            moments = moments / factors[:, None]
        weighted = (moments * samples).sum(0) / total
        return weighted[:width], weighted[width:]
    means = rows[:, :width] / factors[:, None]
    # Biased second moments can be averaged; Bessel's correction is applied to the pooled one.
    biased = rows[:, width : 2 * width] / factors[:, None] * (samples - 1) / samples
    mean = (means * samples).sum(0) / total
    squares = ((biased + means**2) * samples).sum(0) / total
    return mean, (squares - mean**2) * total / (total - 1)


def _layers_with_statistics(stage: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a stage's layers with running statistics, with their paths."""
    for name, module in stage.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield name, module


def _count(norm: Any) -> Tensor:
    counted = norm.num_batches_tracked
    found: Tensor = norm.running_mean.new_zeros(()) if counted is None else counted.clone()
    return found


def check_statistics_reachable(program: Program, stages: Iterable[Segment]) -> None:
    """Check that only modules move running statistics in these stages.

    Capture may flatten a module of an unknown class into single operations, to which the hooks
    here cannot be attached.

    Checked are stages with replicas or deferred statistics.
    """
    held = {path for stage in stages for path, _ in stage.named_modules()}
    for node in program.graph.nodes:
        changed = mutated_inputs(node, program) if node.op == "call_function" else []
        for path in filter(None, (_norm_of(each, program) for each in changed)):
            if path in held:
                found = type(program.model.get_submodule(path)).__name__
                raise PlanMismatch(
                    f"{path} ({found}) was captured as single operations, whose running statistics "
                    "can be neither deferred nor shared by replicas; use torch.nn's own class "
                    "there, or plan without replicas of its stage (max_replicas=1) and omit "
                    "batch_statistics"
                )


def _norm_of(node: fx.Node, program: Program) -> str:
    """Return the path of the training-mode layer whose running mean this is; empty for others."""
    path, _, name = str(node.target).rpartition(".")
    if node.op != "get_attr" or name != "running_mean":
        return ""
    module = find_module(program.model, path)
    return path if isinstance(module, _NormBase) and module.training else ""
