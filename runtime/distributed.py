"""A planned model across processes: one stage a rank, on ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from ..capture.capture import default_device
from ..capture.program import value_of
from ..capture.sample import tensor_spec
from ..core.errors import InvalidInput, PlanMismatch, StagewrightError
from ..core.graph import Graph
from ..core.plan import Plan
from ..core.schedule import Schedule
from ..core.tensors import TensorSpec
from ..core.units import count
from ..schedules.of_plan import schedule_of
from ..schedules.validate import validate
from .batch_statistics import BatchStatistics, RunningStatistics
from .clipping import clip_to_global_norm
from .cut import CutModel, cut_for_plan
from .executor import Executor, Observer
from .gradient_sum import GradientSum
from .groups import Groups
from .held import held
from .messages import Connections
from .microbatch import join_outputs, split_batch
from .runnable import check_runnable
from .shared_weights import agree, holders, shared_weights
from .stage_run import StageRun
from .targets import split_target
from .torch_engine import TorchEngine
from .watch import Watch

LossFunction = Callable[[Any, Tensor], Tensor]

DEFAULT_TIMEOUT_S = 300.0


class DistributedPipeline:
    """This rank's stages of a planned model, ready to train.

    Every rank builds the same model, makes a `DistributedPipeline` of it, and calls `step` with
    the same batch; the first stage reads the inputs, the last one the target. Under ``torchrun``
    with as many processes as the plan has devices::

        dist.init_process_group()
        pipeline = DistributedPipeline(model, plan, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(pipeline.module.parameters())
        for batch, target in data:
            loss = pipeline.step(batch, target=target)   # where the last stage is; None elsewhere
            optimizer.step()
            optimizer.zero_grad()
        pipeline.close()

    Ranks are numbered place by place: all replicas of the first stage, then those of the second
    (`Schedule.stage_ranks`). Replicas are dealt the micro-batches in turn, and gradients are summed
    over them: every rank's ``.grad`` is that of the mean over the whole batch.

    Args:
        model: The model the plan was made for, the same on every rank.
        plan: Where to cut, and in which order to work.
        loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch; gradients are those of
            the mean over the whole batch. `None` for a pipeline that only evaluates.
        device: Where this rank's stages run; `None` leaves them where the model is.
        group: The ranks, in order; the default group if `None`.
        sample: See `runtime.cut.cut_for_plan`.
        schedule: An order of work instead of the plan's, for the same stages and micro-batches.
        autocast: Run the stages and the loss under ``torch.autocast`` to this dtype. A plan made
            from a profile under the same autocast counts what is then sent.
        keyed_dropout: A seed by which dropout follows layer, step and micro-batch alone, so that
            no number depends on the plan (`runtime.keyed_dropout`); `None` for masks as they come.
        batch_statistics: How running statistics move; see `runtime.batch_statistics`.
        engine: ``stagewright`` runs any schedule. ``torch`` runs gpipe and 1f1b by
            ``torch.distributed.pipelining``, for comparison.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks, or uses what
            `runtime.runnable` lists as not run in processes.
        InvalidInput: ``torch.distributed`` is not initialised, or the schedule can never finish.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss_fn: LossFunction | None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        sample: Any = None,
        schedule: Schedule | None = None,
        autocast: torch.dtype | None = None,
        keyed_dropout: int | None = None,
        batch_statistics: BatchStatistics = "microbatch",
        engine: Literal["stagewright", "torch"] = "stagewright",
    ) -> None:
        check_runnable(plan, "torch's processes" if engine == "torch" else "processes")
        self.schedule = _fitting(schedule, plan) if schedule else schedule_of(plan)
        _check_world(self.schedule, group)
        self._ranks = Groups(group)
        self.rank = self._ranks.rank
        self.plan = plan
        self._group = group
        self.diagnosing = False
        """Whether it is finding out which rank failed; a signal handler should let it finish."""
        self.device = torch.device(device) if device is not None else default_device(model)
        self._autocast = autocast
        with self._casting(
            default_device(model)
        ):  # so that what is sent has the dtype it will have
            self._pieces = cut_for_plan(model, plan, sample)
        self._watch = Watch(
            distributed_c10d._get_default_store(), self.rank, self._ranks.size, group
        )
        self.stages = {i: self._pieces.stages[i] for i in self.schedule.stages_of(self.rank)}
        """This rank's stages by index."""
        self.module = held(list(self.stages.values())).to(self.device)
        """All parameters and buffers of this rank, under the model's own names."""
        self._loss_fn, self._batch_statistics = loss_fn, batch_statistics
        self._dropout_seed = keyed_dropout
        self.steps = 0
        """Steps taken, which keyed dropout follows: set it when resuming."""
        with self._explained():
            self._set_up(engine)

    def _set_up(self, engine: Literal["stagewright", "torch"]) -> None:
        stage_of = [stage for stage, count in enumerate(self.plan.balance) for _ in range(count)]
        parameters = self.graph.parameters
        sets = {holders(record, stage_of, self.schedule) for record in parameters}
        sets.update(self.schedule.stage_ranks)
        self._groups = self._ranks.of_sets(ranks for ranks in sets if len(ranks) > 1)
        agree(parameters, stage_of, self.schedule, self.module, self._groups)
        weights = shared_weights(parameters, stage_of, self.schedule, self.module)
        self._holders = {id(weight.tensor): len(weight.ranks) for weight in weights}
        self._gradient_sum = GradientSum(weights, self._groups, self.stages) if weights else None
        self._sums_gradients = True
        self._engine: Executor | TorchEngine = (
            self._executor() if engine == "stagewright" else self._torch_engine()
        )

    def step(
        self, *args: Tensor, target: Any = None, loss_scale: float = 1.0, **kwargs: Tensor
    ) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to what is in ``.grad``.

        Args:
            *args: The whole batch as the model takes it: every rank may pass it, those of the
                first stage use it.
            target: The whole batch's target, a tensor or a nest of them: every rank may pass it,
                those of the last stage use it.
            loss_scale: What gradients, not the loss returned, are multiplied by.
            **kwargs: Inputs by keyword.

        Returns:
            The batch's mean loss where the last stage is, `None` elsewhere.

        Raises:
            InvalidInput: The batch is not the plan's micro-batches.
            RankFailed: Another rank died or stopped answering; the message names it.
        """
        if self._loss_fn is None or self.plan.schedule == "forward_only":
            raise InvalidInput(
                "this pipeline only evaluates; to train give it a loss_fn and a plan for training"
            )
        inputs = self._inputs(args, kwargs)
        if self._has_last and target is None:
            raise InvalidInput("the last stage takes the loss and needs target=")
        targets = split_target(target, self.plan.num_microbatches) if self._has_last else []
        with self._explained(), self._casting(self.device):
            if isinstance(self._engine, TorchEngine):
                return self._step_of_torch(inputs, target)
            seed = self._dropout_seed
            losses = self._engine.train(
                inputs,
                targets,
                loss_scale=loss_scale,
                sums_gradients=self._sums_gradients,
                dropout_key=None if seed is None else (seed, self.steps),
            )
            self.steps += 1
            return self._whole_loss(losses)

    def evaluate(
        self, *args: Tensor, target: Any = None, **kwargs: Tensor
    ) -> tuple[Any, Tensor | None]:
        """Forwards of one batch, without gradients; `train` chooses the mode, this does not.

        Args:
            *args: As for `step`.
            target: As for `step`, for the loss; may be left out.
            **kwargs: As for `step`.

        Returns:
            The model's output for the whole batch, and the mean loss if there is a target, where
            the last stage is; `None` twice elsewhere.
        """
        if isinstance(self._engine, TorchEngine):
            raise InvalidInput("torch's schedules do not evaluate; use engine='stagewright'")
        inputs = self._inputs(args, kwargs)
        targets: list[Any] = []
        if self._has_last and target is not None and self._loss_fn is not None:
            targets = split_target(target, self.plan.num_microbatches)
        with self._explained(), self._casting(self.device):
            made, losses = self._engine.evaluate(inputs, targets)
            if not self._has_last:
                return None, None
            outputs = self._all_outputs(made)
            loss = self._whole_loss(losses) if targets else None
        sizes = [self._microbatch_size] * len(outputs)
        return self._pieces.captured.unflatten_output(join_outputs(outputs, sizes)), loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside add to this rank's gradients without summing them over other ranks.

        For batches larger than the plan's: take all steps but the last inside. On every rank alike.
        """
        self._sums_gradients = False
        try:
            yield
        finally:
            self._sums_gradients = True

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        Called on every rank, between `step` and the optimizer's.

        Returns:
            The norm before, the same on every rank and as the unsplit model's.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        with self.during("clipping gradients"):
            return clip_to_global_norm(
                self.module.parameters(), max_norm, self._holders, self._group, self.device
            )

    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises:
            RankFailed: One never came; the message names it.
        """
        with self.during("a barrier"):
            dist.barrier(self._group)

    def share_results(self, loss: Tensor | None, elapsed_s: float) -> tuple[float, float]:
        """The last stage's loss and the slowest rank's time, on every rank.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        last = self.schedule.stage_ranks[-1][0]
        mean = loss if loss is not None else torch.zeros(())
        figures = torch.tensor([float(mean), elapsed_s], dtype=torch.float64, device=self.device)
        with self.during("sharing the loss"):
            dist.broadcast(figures[:1], group_src=last, group=self._group)
            dist.all_reduce(figures[1:], op=dist.ReduceOp.MAX, group=self._group)
        return float(figures[0]), float(figures[1])

    def train(self, mode: bool = True) -> None:
        """Switch the mode of this rank's stages; see `capture.segment.Segment.train`."""
        self.module.train(mode)

    def observe(self, observer: Observer | None) -> None:
        """Tell ``observer`` of every action from now on: what it was, its start and its end."""
        if isinstance(self._engine, Executor):
            self._engine.observer = observer

    def close(self) -> None:
        """Stop watching the other ranks; call it before destroying the process group."""
        self._watch.close()

    def _casting(self, device: torch.device) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        # Weights are cast anew in every action: a cache would outlive the step that fills it.
        return torch.autocast(device.type, self._autocast, cache_enabled=False)

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Inside, communication that fails raises a `RankFailed` that says what this rank did."""
        self._watch.says(doing)
        with self._explained():
            yield

    @property
    def graph(self) -> Graph:
        """The model's, as it was captured here."""
        return self._pieces.captured.graph

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks; `None` for the default group."""
        return self._group

    @property
    def _has_last(self) -> bool:
        return self.plan.num_stages - 1 in self.stages

    @property
    def _microbatch_size(self) -> int:
        return self.plan.inputs[0].shape[0]

    def _executor(self) -> Executor:
        groups = self._ranks
        several = groups.size > 1
        connections = Connections(
            self.rank,
            groups.everyone() if several else None,
            groups.everyone() if several else None,
            groups.global_ranks,
            self._pieces.boundaries,
            self.device,
        )
        last, specs = self.plan.num_stages - 1, [b.tensors for b in self._pieces.boundaries]
        takes_loss = self._loss_fn is not None
        stages = {
            index: StageRun(
                stage,
                specs[index - 1] if index else self.plan.inputs,
                specs[index] if index < last else (),
                self._share_of_loss if index == last and takes_loss else None,
                self.device,
                self._statistics(index),
            )
            for index, stage in self.stages.items()
        }
        executor = Executor(
            self.schedule, self.rank, stages, connections, self._gradient_sum, self._watch.says
        )
        connections.introduce(executor.connected)
        return executor

    def _statistics(self, stage: int) -> RunningStatistics | None:
        replicas = self.schedule.stage_ranks[stage]
        found = RunningStatistics(
            self.stages[stage],
            self._batch_statistics,
            self.plan.num_microbatches,
            len(replicas),
            replicas.index(self.rank),
            self._groups.get(replicas),
        )
        return found if found.is_needed else None

    def _torch_engine(self) -> TorchEngine:
        return TorchEngine(
            self.module,
            self.rank,
            self.plan,
            self._pieces.boundaries,
            _output_specs(self._pieces),
            self._share_of_loss,
            self.device,
            self._group,
            self._watch,
        )

    def _step_of_torch(self, inputs: list[tuple[Tensor, ...]], target: Any) -> Tensor | None:
        assert isinstance(self._engine, TorchEngine)
        flat = tuple(torch.cat(column) for column in zip(*inputs, strict=True))
        if self._gradient_sum is not None:
            self._gradient_sum.begin()
        loss = self._engine.step(flat, target)
        if self._gradient_sum is not None:
            self._gradient_sum.last_backward_ended(self.rank)
            self._gradient_sum.finish()
        return loss

    def _inputs(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> list[tuple[Tensor, ...]]:
        """The micro-batches; checked wherever there is a batch, used where the first stage is."""
        if 0 not in self.stages and not args and not kwargs:
            return []
        flat = self._pieces.structure.flatten(args, kwargs)
        self._check_batch(flat)
        names = self._pieces.structure.names
        batches = split_batch(flat, self.plan.num_microbatches, self._microbatch_size, names)
        if self.device.type == "cpu":
            return batches
        return [
            tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)
            for batch in batches
        ]

    def _check_batch(self, flat: tuple[Tensor, ...]) -> None:
        for spec, tensor in zip(self.plan.inputs, flat, strict=True):
            wanted = (spec.shape[0] * self.plan.num_microbatches, *spec.shape[1:])
            if tuple(tensor.shape) != wanted:
                raise InvalidInput(
                    f"input {spec.name!r} has shape {tuple(tensor.shape)}; this plan's batch is "
                    f"{wanted}: {self.plan.num_microbatches} micro-batches of {spec.shape[0]}"
                )

    def _share_of_loss(self, flat: Any, target: Any) -> Tensor:
        assert self._loss_fn is not None
        tensors = iter(flat if isinstance(flat, tuple | list) else [flat])
        tensors = (value for value in tensors if isinstance(value, Tensor))
        outputs = [
            next(tensors) if isinstance(node, fx.Node) else node
            for node in self._pieces.captured.program.flat_outputs
        ]
        output = self._pieces.captured.unflatten_output(outputs)
        if self.device.type != "cpu":
            target = pytree.tree_map_only(Tensor, lambda value: value.to(self.device), target)
        loss = self._loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidInput(
                f"loss_fn returned {found}, and has to return one number; take the mean over the "
                "micro-batch"
            )
        return loss.reshape(()) / self.plan.num_microbatches

    def _whole_loss(self, shares: list[Tensor]) -> Tensor | None:
        """The mean over the batch, of which each replica of the last stage took a part."""
        if not self._has_last:
            return None
        loss = torch.stack(shares).sum() if shares else torch.zeros((), device=self.device)
        replicas = self.schedule.stage_ranks[-1]
        if len(replicas) > 1:
            dist.all_reduce(loss, group=self._groups[replicas])
        return loss

    def _all_outputs(self, made: dict[int, list[Any]]) -> list[tuple[Any, ...]]:
        """Outputs of all micro-batches, those that other replicas of the last stage made too."""
        replicas = self.schedule.stage_ranks[-1]
        if len(replicas) == 1:
            return [tuple(made[index]) for index in range(self.plan.num_microbatches)]
        group, template = self._groups[replicas], next(iter(made.values()))
        outputs = []
        for index in range(self.plan.num_microbatches):
            source = index % len(replicas)
            values = made.get(index) or [
                torch.empty_like(value) if isinstance(value, Tensor) else value
                for value in template
            ]
            for value in values:
                if isinstance(value, Tensor):
                    dist.broadcast(value, group_src=source, group=group)
            outputs.append(tuple(values))
        return outputs

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

    In a job that torchrun restarts use `runtime.elastic.join`: torch's store keeps the keys of the
    attempt before.

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


def _output_specs(pieces: CutModel) -> tuple[TensorSpec, ...]:
    return tuple(
        tensor_spec(node.name, value_of(node), requires_grad=value_of(node).is_floating_point())
        for node in pieces.captured.program.flat_outputs
        if isinstance(node, fx.Node)
    )


def _check_world(schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    wanted = len(schedule.ranks)
    if not dist.is_initialized():
        raise InvalidInput(
            "call torch.distributed.init_process_group first, and start one process a device: "
            f"torchrun --nproc-per-node {wanted} train.py"
        )
    ranks = dist.get_world_size(group)
    if ranks != wanted:
        raise PlanMismatch(
            f"the plan has {count(schedule.num_stages, 'stage')} on {count(wanted, 'device')}, "
            f"but {count(ranks, 'rank')} started; start {wanted}, or plan for "
            f"{count(ranks, 'device')}"
        )


def _fitting(schedule: Schedule, plan: Plan) -> Schedule:
    """A schedule of the caller's own, if it can be run for this plan."""
    validate(schedule)
    theirs = (schedule.num_stages, schedule.num_microbatches)
    wanted = (plan.num_stages, plan.num_microbatches)
    if theirs != wanted:
        raise PlanMismatch(
            f"the schedule has {theirs[0]} stages and {theirs[1]} micro-batches, the plan "
            f"{wanted[0]} and {wanted[1]}; write it for the plan's"
        )
    return schedule
