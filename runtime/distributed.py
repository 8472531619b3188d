"""A planned model across processes: one stage a rank, on ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d

from ..capture.capture import default_device
from ..capture.program import resolve, value_of
from ..capture.sample import tensor_spec
from ..core.errors import InvalidInput, PlanMismatch, StagewrightError
from ..core.plan import Plan
from ..core.tensors import TensorSpec
from .cut import CutModel, TiedGroup, cut_for_plan
from .runnable import check_runnable
from .torch_engine import Engine
from .watch import Watch

LossFunction = Callable[[Any, Tensor], Tensor]

DEFAULT_TIMEOUT_S = 300.0


class DistributedPipeline:
    """This rank's stage of a planned model, ready to train.

    Every rank builds the same model, makes a `DistributedPipeline` of it, and calls `step` with
    the same batch; the first stage reads the inputs, the last one the target. Under ``torchrun``
    with as many processes as the plan has stages::

        dist.init_process_group()
        pipeline = DistributedPipeline(model, plan, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(pipeline.module.parameters())
        for batch, target in data:
            loss = pipeline.step(batch, target=target)   # on the last rank; None elsewhere
            optimizer.step()
            optimizer.zero_grad()
        pipeline.close()

    Args:
        model: The model the plan was made for, the same on every rank.
        plan: Where to cut; rank ``s`` of the group runs stage ``s``.
        loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch; gradients are those of
            the mean over the whole batch.
        device: Where this rank's stage runs; `None` leaves it where the model is.
        group: The ranks, in stage order; the default group if `None`.
        sample: See `runtime.cut.cut_for_plan`.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks, or uses what
            `runtime.runnable` lists as not run in processes.
        InvalidInput: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss_fn: LossFunction,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        sample: Any = None,
    ) -> None:
        check_runnable(plan)
        if not dist.is_initialized():
            raise InvalidInput(
                "call torch.distributed.init_process_group first, and start one process a stage: "
                f"torchrun --nproc-per-node {plan.num_stages} train.py"
            )
        ranks = dist.get_world_size(group)
        if ranks != plan.num_stages:
            raise PlanMismatch(
                f"the plan has {plan.num_stages} stages, but {ranks} ranks were started; "
                f"start {plan.num_stages}, or plan for {ranks} stages"
            )
        if plan.schedule == "1f1b" and plan.num_microbatches < ranks:
            raise InvalidInput(
                f"torch's 1F1B needs at least as many micro-batches as stages, here {ranks}; this "
                f"plan has {plan.num_microbatches}: plan with more, or with the gpipe schedule"
            )
        self.rank = dist.get_rank(group)
        self.plan = plan
        self._group = group
        self.diagnosing = False
        """Whether it is finding out which rank failed; a signal handler should let it finish."""
        self._pieces = cut_for_plan(model, plan, sample)
        self._watch = Watch(distributed_c10d._get_default_store(), self.rank, ranks, group)
        self.module: nn.Module = self._pieces.stages[self.rank]
        self.device = torch.device(device) if device is not None else default_device(model)
        self.module.to(self.device)
        self._loss_fn = loss_fn
        self._engine = Engine(
            self.module,
            self.rank,
            plan,
            self._pieces.boundaries,
            _output_specs(self._pieces),
            self._share_of_loss,
            self.device,
            group,
            self._watch,
        )
        self._tied = [(tied, _owners(tied, group)) for tied in self._pieces.tied]
        with self._explained():
            self._agree_on_tied_weights()

    def step(self, *args: Tensor, target: Tensor | None = None, **kwargs: Tensor) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to what is in ``.grad``.

        Args:
            *args: The whole batch as the model takes it: every rank may pass it, the first uses it.
            target: The whole batch's target: every rank may pass it, the last uses it.
            **kwargs: Inputs by keyword.

        Returns:
            The batch's mean loss on the last rank, `None` elsewhere.

        Raises:
            InvalidInput: The batch is not the plan's micro-batches.
            RankFailed: Another rank died or stopped answering; the message names it.
        """
        flat: tuple[Tensor, ...] = ()
        if self.rank == 0 or args or kwargs:  # refused on every rank alike, where all have it
            flat = self._pieces.structure.flatten(args, kwargs)
            self._check_batch(flat)
        if self.rank == self.plan.num_stages - 1 and target is None:
            raise InvalidInput("the last stage takes the loss and needs target=")
        self._share_earlier_tied_gradients()
        with self._explained():
            loss = self._engine.step(flat, target)
            self._sum_tied_gradients()
        return loss

    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises:
            RankFailed: One never came; the message names it.
        """
        self._watch.doing = "a barrier"
        with self._explained():
            dist.barrier(self._group)

    def share_results(self, loss: Tensor | None, elapsed_s: float) -> tuple[float, float]:
        """The last rank's loss and the slowest rank's time, on every rank.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        self._watch.doing = "sharing the loss"
        last = self.plan.num_stages - 1
        mean = loss if loss is not None else torch.zeros(())
        figures = torch.tensor([float(mean), elapsed_s], dtype=torch.float64, device=self.device)
        with self._explained():
            dist.broadcast(figures[:1], group_src=last, group=self._group)
            dist.all_reduce(figures[1:], op=dist.ReduceOp.MAX, group=self._group)
        return float(figures[0]), float(figures[1])

    def train(self, mode: bool = True) -> None:
        """Switch this stage's mode; see `capture.segment.Segment.train`."""
        self.module.train(mode)

    def close(self) -> None:
        """Stop watching the other ranks; call it before destroying the process group."""
        self._watch.close()

    def _share_of_loss(self, flat: Any, target: Tensor) -> Tensor:
        tensors = iter(flat if isinstance(flat, tuple | list) else [flat])
        outputs = [
            next(tensors) if isinstance(node, fx.Node) else node
            for node in self._pieces.captured.program.flat_outputs
        ]
        output = self._pieces.captured.unflatten_output(outputs)
        return self._loss_fn(output, target) / self.plan.num_microbatches

    def _check_batch(self, flat: tuple[Tensor, ...]) -> None:
        for spec, tensor in zip(self.plan.inputs, flat, strict=True):
            wanted = (spec.shape[0] * self.plan.num_microbatches, *spec.shape[1:])
            if tuple(tensor.shape) != wanted:
                raise InvalidInput(
                    f"input {spec.name!r} has shape {tuple(tensor.shape)}; this plan's batch is "
                    f"{wanted}: {self.plan.num_microbatches} micro-batches of {spec.shape[0]}"
                )

    def _agree_on_tied_weights(self) -> None:
        """Every holder of a tied weight starts from its first stage's values."""
        for _, group, weight in self._my_tied():
            with torch.no_grad():
                dist.broadcast(weight, group_src=0, group=group)

    def _my_tied(self) -> list[tuple[TiedGroup, dist.ProcessGroup | None, Tensor]]:
        return [
            (tied, group, self._weight(tied))
            for tied, group in self._tied
            if self.rank in tied.stages
        ]

    def _share_earlier_tied_gradients(self) -> None:
        """What earlier steps left is a sum already: give each owner its share before summing again.

        Keeping it apart instead would take a second gradient's memory.
        """
        for tied, _, weight in self._my_tied():
            if weight.grad is not None:
                weight.grad /= len(tied.stages)

    def _sum_tied_gradients(self) -> None:
        for tied, group, weight in self._my_tied():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            self._watch.doing = f"summing the gradient of {tied.names[0]}"
            dist.all_reduce(weight.grad, group=group)

    def _weight(self, tied: TiedGroup) -> Tensor:
        for name in tied.names:
            try:
                value = resolve(self.module, name)
            except AttributeError:
                continue
            assert isinstance(value, Tensor)
            return value
        raise AssertionError(f"{tied.names} is not on stage {self.rank}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a transport's error into one that names the rank that failed."""
        try:
            yield
        except StagewrightError:
            raise
        except RuntimeError as error:
            if not _is_transport(error):
                raise
            self.diagnosing = True
            try:
                failure = self._watch.failure(error)
            finally:
                self.diagnosing = False
            raise failure from error


def init_process_group(*, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """``torch.distributed.init_process_group`` from torchrun's variables, with a timeout.

    Args:
        backend: ``nccl`` where there are GPUs, ``gloo`` elsewhere, unless given.
        timeout_s: How long a rank waits for another before it asks who is missing.
    """
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))


_TRANSPORT_WORDS = (
    "connection", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket", "store", "peer",
)  # fmt: skip


def _is_transport(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, came from communication rather than from the model."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        text = str(error).lower()
        if not isinstance(error, StagewrightError) and any(
            word in text for word in _TRANSPORT_WORDS
        ):
            return True
        error = error.__cause__
    return False


def _owners(tied: TiedGroup, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the ranks that hold a tied weight; every rank takes part in making it."""
    ranks = [dist.get_global_rank(group, stage) if group else stage for stage in tied.stages]
    made: dist.ProcessGroup | None = dist.new_group(ranks)
    return made


def _output_specs(pieces: CutModel) -> tuple[TensorSpec, ...]:
    return tuple(
        tensor_spec(node.name, value_of(node), requires_grad=value_of(node).is_floating_point())
        for node in pieces.captured.program.flat_outputs
        if isinstance(node, fx.Node)
    )
