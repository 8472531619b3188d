"""Training pipeline across processes, on ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..capture.capture import default_device
from ..capture.observation.nested_values import list_tensors
from ..capture.sample import check_module
from ..core.errors import InvalidInput, NonFinite, PlanMismatch
from ..core.models.training_memory import Recipe
from ..core.plan.plan import Plan
from ..core.plan.schedule import Schedule
from ..core.rank_heartbeats import SILENCE_S
from ..core.units import list_some
from ..schedules.plan_schedule import schedule_of
from .batchnorm.running_statistics import BatchStatistics, check_policy
from .engine.action_timer import ActionTimer, Observer
from .engine.assemble import assemble_rank
from .engine.aux_losses import AuxLoss, AuxLosses, find_aux_losses
from .engine.batch_comparison import BatchComparison
from .engine.batch_io import (
    BatchInputs,
    LossFunction,
    check_gradients_enabled,
    check_loss_function,
)
from .engine.finite_check import FiniteCheck
from .engine.loss_reduction import LossReduction
from .engine.microbatch import split_target
from .engine.padding import (
    check_evaluation_mode,
    count_samples,
    pad_samples,
    split_partial_target,
    trim_padding,
)
from .engine.rank_facts import list_facts
from .engine.stage import autocast_to
from .meta_init.materialise import materialise
from .meta_init.meta_capture import check_weights, is_on_meta
from .meta_init.weights import Weights
from .optimizer import Groups, make_optimizer
from .partition.cut import CutModel, cut_for_plan
from .partition.model_snapshot import ModelSnapshot
from .ranks.consistency import check_consistency
from .ranks.device_placement import choose_device
from .ranks.failure_detection import ConnectionEnded
from .ranks.pipeline_rank import PipelineRank
from .ranks.process_groups import check_initialised, check_world
from .ranks.process_groups import init_process_group as init_process_group
from .ranks.rank_grid import grid_of
from .replicas.clip_grad import clipping_factor, scale_gradients, sum_of_squares
from .replicas.replaced import release_others
from .replicas.sharded import check_whole_weights, is_sharded
from .replicas.strategy import NonDefaultStrategy, Strategy, choose_strategies
from .replicas.sync_batchnorm import check_no_sync_batch_norm
from .supported_plans import check_runnable, check_schedule, check_stateful_layers
from .tensor_parallel.exchange import ShardGroup
from .tensor_parallel.split_model import SplitModel


class DistributedPipeline(PipelineRank):
    """This rank's stages of a planned model, ready to train.

    Every rank builds the model, wraps it in a `DistributedPipeline` and calls `step` with the same
    batch; the first stage reads the inputs, the last one the target. Under ``torchrun`` with one
    process per device of the plan::

        stagewright.init_process_group()
        pipeline = DistributedPipeline(model, plan, loss_fn=loss_fn)
        optimizer = pipeline.optimizer(torch.optim.AdamW)
        for batch, target in data:
            loss = pipeline.step(batch, target=target)   # on the last stage; None elsewhere
            optimizer.step()
            optimizer.zero_grad()
        pipeline.close()

    Ranks are numbered stage by stage: all replicas of the first stage, then those of the second
    (`Schedule.stage_ranks`), and the ranks that share a replica by tensor parallelism one after the
    other (`grid`). Micro-batches are dealt to replicas in turn, and gradients are summed
    over them: every rank's ``.grad`` is that of the mean loss of the whole batch.

    Args:
        model: The model the plan was made for, equal on every rank. On the meta device it takes no
            memory, and each rank allocates only its own stages and fills them from ``weights``.
        plan: Where to cut, and in which order to work.
        loss_fn: ``loss_fn(output, target)`` of a micro-batch, by default a mean over its samples;
            gradients are those of the whole batch's. `None` for a pipeline that only evaluates.
        device: Where this rank's stages run. `None` for the current GPU with NCCL, unless the
            model is on another one, and for the model's device with gloo.
        group: The ranks, in order; the default group if `None`.
        sample: See `cut_for_plan`.
        schedule: An order of work instead of the plan's, for the same stages and micro-batches.
        autocast: Run the stages and the loss under ``torch.autocast`` to this dtype, the backward
            outside of it. Plan from a profile under the same autocast, so that messages have the
            planned dtypes.
        keyed_dropout: A seed that makes dropout depend on the layer, step and micro-batch alone,
            and not on the plan (`engine.keyed_dropout`); `None` to draw masks as they come.
        batch_statistics: Policy for running statistics (`batchnorm.running_statistics`).
        aux_losses: Attributes in which modules leave losses of a micro-batch in training mode
            (`engine.aux_losses`). `step` differentiates them on their own stages and adds their
            mean over micro-batches to the loss; `evaluate` leaves them out.
        strategy: What the replicas of a stage do, for all stages with several or by stage: sum
            gradients (``reduce``), leave that to ``ddp``, or ``fully_shard`` their weights; see
            `replicas.strategy.Strategy`. `None` follows the plan's stages.
        weights: Source of the values of a model on the meta device.
        loss_reduction: What ``loss_fn`` is over samples (`engine.loss_reduction`); the first step
            looks whether it is.
        check_finite: Raise `NonFinite` in a step whose loss, or a gradient that stages send each
            other, is infinite or NaN, unless the step has a loss scale.

    Attributes:
        stages: This rank's stages by index.
        module: All parameters and buffers of this rank, under the model's own names.
        graph: The graph of the model as captured here.
        owned: Weights of which one replica keeps the optimizer's state, by stage.
        split: How layers were split over ranks by tensor parallelism; `None` if none were.
        schedule_rank: The rank of the schedule that this one does the work of.
        autocast: The dtype that stages and loss are cast to; `None` for none.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks, cannot be run in
            processes (`supported_plans`), or does not allow the strategy.
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
        aux_losses: AuxLosses | None = None,
        strategy: Strategy | Mapping[int, Strategy] | None = None,
        weights: Weights | None = None,
        check_finite: bool = True,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        _check_start(plan)
        super().__init__(group)
        self.plan, self.autocast, self.check_finite = plan, autocast, check_finite
        self._has_loss, self._sums_gradients = loss_fn is not None, True
        self._dropout_seed = keyed_dropout
        # The detector comes before every check: an error on this rank alone is then told to the
        # others, which would wait for it. And an error must stop the heartbeat, or other ranks take
        # this one for alive.
        with ExitStack() as undo, self._detector.explain_errors():
            undo.callback(self.close)
            _check_arguments(model, plan, loss_fn, batch_statistics, schedule)
            self.schedule = schedule or schedule_of(plan)
            self.grid = grid_of(plan, self.schedule)
            chosen = choose_strategies(plan, self.schedule, strategy)
            check_world(plan.num_stages, self.grid.size, group)
            check_weights(model, weights)
            self.device = choose_device(model, group, device)
            # Captured under autocast, so that messages have the dtypes that training will give.
            with autocast_to(self.device if is_on_meta(model) else default_device(model), autocast):
                pieces = cut_for_plan(
                    model, plan, sample, direct=True, device=self.device, shards=self._find_shard(),
                    blocks=[at for at, asked in chosen.items() if asked == "fully_shard"],
                )  # fmt: skip
            self.graph, self.split = pieces.captured.graph, pieces.split
            _check_split(self.split, plan)
            check_stateful_layers(self.graph.layers, plan, self.schedule)
            options = {
                "autocast": autocast, "strategy": strategy, "loss_reduction": loss_reduction,
                "keyed_dropout": keyed_dropout, "batch_statistics": batch_statistics,
                "check_finite": check_finite, "aux_losses": aux_losses, "no loss": loss_fn is None,
            }  # fmt: skip
            facts = list_facts(model, self.graph, plan, self.schedule, options)
            check_consistency(self._detector, facts, plan.content_id())
            self._start_watching()
            self.stages = {i: pieces.stages[i] for i in self.schedule.stages_of(self.schedule_rank)}
            self._trains = loss_fn is not None and plan.schedule != "forward_only"
            if self._trains:
                _check_equal_draws(self.split, keyed_dropout)
            losses = find_aux_losses(pieces, aux_losses) if self._trains else []
            if weights is not None:
                materialise(model, self.stages.values(), weights, self.device)
            self._assemble(pieces, chosen, loss_fn, loss_reduction, batch_statistics, losses)
            undo.pop_all()

    def _find_shard(self) -> ShardGroup | None:
        """Find this rank's place among those that share a rank of the schedule, if any do."""
        self.schedule_rank, shard = self.grid.locate(self.rank)
        width = self.grid.widths[self.schedule_rank]
        return ShardGroup(shard, width, self.device) if self.grid.is_shared else None

    def _assemble(
        self,
        pieces: CutModel,
        chosen: Mapping[int, NonDefaultStrategy],
        loss_fn: LossFunction | None,
        loss_reduction: LossReduction,
        batch_statistics: BatchStatistics,
        aux_losses: Sequence[Sequence[AuxLoss]],
    ) -> None:
        """Connect this rank's stages to those of the others."""
        self._has_aux_losses = any(aux_losses)
        self._first = BatchInputs(self.plan, pieces.structure, self.device)
        assembled = assemble_rank(
            pieces,
            self.stages,
            self.plan,
            self.schedule,
            self._ranks,
            self.grid,
            chosen=chosen,
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            device=self.device,
            batch_statistics=batch_statistics,
            autocast=self.autocast,
            aux_losses=aux_losses,
            set_activity=self._detector.set_activity,
        )
        self.module, self._holders = assembled.module, assembled.holders
        self._last, self._executor = assembled.outputs, assembled.executor
        self.owned = assembled.owned
        self._batches = BatchComparison(self._detector, self.first_of_last_stage)
        release_others(pieces.captured.roots, self.module)
        self._snapshot, self._model = ModelSnapshot(pieces.captured), pieces.captured.program.model
        self._is_training = self._model.training
        if self._watcher is not None:
            self._meet()  # NCCL connects ranks at their first operation

    def step(
        self, *args: Tensor, target: Any = None, loss_scale: float = 1.0, **kwargs: Tensor
    ) -> Tensor | None:
        """Run forward and backward of one batch, adding gradients to ``.grad``.

        Args:
            *args: The model's inputs for the whole batch. Every rank may pass them; ranks of the
                first stage use them.
            target: The whole batch's target, a tensor or a nest of tensors. Every rank may pass
                it; ranks of the last stage use it.
            loss_scale: Factor on gradients, but not on the loss returned.
            **kwargs: Inputs by keyword.

        Returns:
            The batch's mean loss on ranks of the last stage, `None` elsewhere.

        Raises:
            InvalidInput: The batch does not have the plan's shapes, or ranks were given different
                batches.
            PlanMismatch: The model was changed after the pipeline was built.
            NonFinite: A loss or gradient is infinite or NaN, which arose on this rank.
            RankFailed: Another rank failed or stopped answering; the message names it.
        """
        if not self._trains:
            raise InvalidInput(
                "this pipeline only evaluates; to train, create it with a loss_fn and a plan for "
                "training"
            )
        # A batch may be wrong on this rank alone, while the others begin the step and wait for it.
        with self._detector.announce_errors():
            check_gradients_enabled()
            self._snapshot.check(training=self._is_training)
            inputs = self._inputs(args, kwargs)
            self._check_no_input_gradients(args, kwargs)
            if self._has_last and target is None:
                raise InvalidInput("the last stage computes the loss and needs target=")
            moved = self._last.move_target(target) if self._has_last else None
            targets = split_target(moved, self.plan.num_microbatches) if self._has_last else []
        seed = self._dropout_seed
        # With a scale the caller expects overflows, and looks for them.
        checks = self.check_finite and loss_scale <= 1
        self._executor.finite_check = FiniteCheck() if checks else None
        with self.during("a step"):
            self._detector.check_verdict()
            self._batches.publish(args, kwargs, target)
            losses = self._executor.train(
                inputs,
                targets,
                loss_scale=loss_scale,
                sums_gradients=self._sums_gradients,
                dropout_key=None if seed is None else (seed, self.steps),
            )
            loss = self._reduce_loss(losses)
            self.steps += 1
            self._raise_if_non_finite(inputs)
            # Last: what was waited for came from ranks that had published their batches before.
            self._batches.compare(self.steps)
        return loss

    def _reduce_loss(self, shares: Sequence[Tensor]) -> Tensor | None:
        """Return the batch's mean loss on ranks of the last stage; called on every rank."""
        if not self._has_aux_losses:
            return self._last.reduce_loss(shares) if self._has_last else None
        # Losses of a model's own modules arise on any rank, and in other dtypes than loss_fn's.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for share in shares:
            total += share / self.grid.widths[self.schedule_rank]
        dist.all_reduce(total, group=self._group)
        return total.to(shares[0].dtype) if self._has_last else None

    def _raise_if_non_finite(self, inputs: Sequence[Sequence[Tensor]]) -> None:
        check = self._executor.finite_check
        self._detector.set_activity("the wait for the end of the step")
        if check is None or check.is_empty:
            self._wait_for_device()
            return
        if (found := check.find(inputs)) is None:
            return
        what, is_received = found
        # What was received was made elsewhere, by a rank that is about to say so.
        if is_received and self._detector.await_verdict(SILENCE_S):
            raise ConnectionEnded(what)
        raise NonFinite(
            f"in step {self.steps}, {what}; correct the data, lower the learning rate, or go "
            "on from an earlier checkpoint (check_finite=False trains on regardless)"
        )

    def evaluate(
        self, *args: Tensor, target: Any = None, pad: bool = False, **kwargs: Tensor
    ) -> tuple[Any, Tensor | None]:
        """Run the forwards of one batch without gradients, in the mode set by `train`.

        Args:
            *args: See `step`.
            target: See `step`; may be omitted, for no loss.
            pad: Allow a batch with fewer samples than the plan's. It is padded with copies of its
                last sample, which count in neither output nor loss. That is correct for models that
                treat samples independently, as most do in evaluation mode. Ranks of the last stage
                need the batch or its target, too.
            **kwargs: See `step`.

        Returns:
            The model's output for the whole batch and, if there is a target, the mean loss, on
            ranks of the last stage; `None` and `None` elsewhere.

        Raises:
            InvalidInput: The batch does not have the plan's shapes, or cannot be padded to them.
            RankFailed: Another rank died or stopped answering; the message names it.
        """
        targets: list[Any] = []
        size = samples = self._first.size
        with self._detector.announce_errors():
            self._snapshot.check(training=self._is_training)
            if pad:
                check_evaluation_mode(self.module)
                samples = self._samples(args, kwargs, target)
                args, kwargs = pad_samples((args, kwargs), size)
            inputs = self._inputs(args, kwargs)
            if self._has_last and target is not None and self._has_loss:
                number, moved = self.plan.num_microbatches, self._last.move_target(target)
                if samples == size:
                    targets = split_target(moved, number)
                else:
                    targets = split_partial_target(moved, number, self._first.microbatch_size)
        with self.during("an evaluation"):
            made, losses = self._executor.evaluate(inputs, targets)
            output = loss = None
            if self._has_last:
                output = self._last.join_batch_output(made, self._first.microbatch_size)
                output = trim_padding(output, size, samples)
                loss = self._last.reduce_loss(losses) if targets else None
            self._wait_for_device()  # for what replicas exchanged, too
            return output, loss

    def _samples(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], target: Any) -> int:
        """Return the number of samples in a batch that may be padded.

        A rank that is given neither inputs nor target need not know it.
        """
        found = (count_samples((args, kwargs)), count_samples(target))
        lengths = {length for length in found if length is not None}
        if len(lengths) > 1:
            raise InvalidInput(
                f"the batch and its target have {' and '.join(map(str, sorted(lengths)))} samples; "
                "pass one target per sample"
            )
        if not lengths and self._has_last:
            raise InvalidInput(
                "pad=True needs the batch or its target on ranks of the last stage, to know the "
                "number of samples"
            )
        return next(iter(lengths), self._first.size)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of steps inside without summing them over ranks.

        For batches larger than the plan's: take all steps but the last inside, on every rank.
        """
        self._sums_gradients = False
        try:
            yield
        finally:
            self._sums_gradients = True

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        groups: Groups | None = None,
        *,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> Optimizer:
        """Create an optimizer of this rank's parameters: ``optimizer(torch.optim.SGD, lr=1)``.

        Replicas that share its state (``zero1``) do so only with an optimizer from here. In
        ``groups``, which have options of their own, ``params`` are parameters of this rank or names
        of the model's, with ``*`` for anything; those in none are the last group. With a ``recipe``
        of precision it keeps master weights.

        Raises:
            InvalidInput: Its updates depend on weights, or on elements, that this rank does not
                hold, as a trial on small weights shows, or a name is none of the model's.
        """
        parts = self.is_divided or any(map(is_sharded, self.module.parameters()))
        several = self.plan.num_stages > 1 or self.owned
        return make_optimizer(
            kind,
            dict(self.module.named_parameters()),
            groups,
            options,
            names=[name for record in self.graph.parameters for name in record.names],
            holds="parts" if parts else "other weights" if several else "",
            owned=self.owned,
            recipe=recipe,
        )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        Call it on every rank, between `step` and the optimizer's step.

        Returns:
            The norm before scaling, on every rank's CPU; it equals the unsplit model's.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        norm = self._read_gradient_norm()
        factor = clipping_factor(norm, max_norm)
        if factor < 1:
            self.scale_gradients(factor)
        return torch.tensor(norm, dtype=torch.float64)

    def gradient_norm(self) -> Tensor:
        """Return the gradients' norm over the whole model, on the CPU; called on every rank.

        It is infinite or NaN on all ranks if any gradient on any rank is.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        return torch.tensor(self._read_gradient_norm(), dtype=torch.float64)

    def _read_gradient_norm(self) -> float:
        with self.during("the norm of the gradients"):
            squares = sum_of_squares(self.module.parameters(), self._holders, self.device)
            dist.all_reduce(squares, group=self._group)
            return float(squares.sqrt())  # inside: after an abort it is garbage

    def scale_gradients(self, factor: float) -> None:
        """Multiply this rank's gradients."""
        scale_gradients(self.module.parameters(), factor)

    def train(self, mode: bool = True) -> None:
        """Switch the mode of this rank's stages, and of the model; see `Segment.train`."""
        self.module.train(mode)
        self._model.training = self._is_training = mode

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return a parameter's value or gradient whole; called on every rank that holds some."""
        local = part.full_tensor() if isinstance(part, DTensor) else part.detach()
        return self.split.join(name, local) if self.split and self.is_divided else local

    def gather_state_dict(self, rank: int = 0) -> dict[str, Tensor] | None:
        """Return the whole model's state on the CPU of one rank, `None` elsewhere; on every rank.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        own = self.module.state_dict()
        divided = self.split.divided if self.split and self.is_divided else {}
        facts = {
            name: (tuple(divided[name].shape if name in divided else each.shape), each.dtype)
            for name, each in own.items()
        }
        found: dict[str, Tensor] = {}
        with self.during("the gathering of the model's state"):
            held: list[dict[str, Any]] = [{} for _ in range(self._ranks.size)]
            dist.all_gather_object(held, facts, group=self._group)
            for name in dict.fromkeys(name for each in held for name in each):
                owner = next(at for at, each in enumerate(held) if name in each)
                if name in own:
                    value = self.whole(name, own[name]).contiguous()
                else:
                    shape, dtype = held[owner][name]
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(value, group_src=owner, group=self._group)
                if self.rank == rank:
                    found[name] = value.cpu()
        return found if self.rank == rank else None

    def observe(self, observer: Observer | None) -> None:
        """Call ``observer`` with each action, its start and its end when a step is done."""
        self._executor.timer = ActionTimer(self.device, observer) if observer else None

    def _check_no_input_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in list_tensors((args, kwargs)):
            if leaf.requires_grad:
                raise InvalidInput(
                    f"an input of shape {tuple(leaf.shape)} requires a gradient, but a pipeline in "
                    "processes computes those of weights alone; detach() the input, make it a "
                    "parameter of the model, or use a Pipeline in one process"
                )

    @property
    def is_divided(self) -> bool:
        """Return True if this rank shares its stages, so that it holds parts of their weights."""
        return self.split is not None and self.grid.widths[self.schedule_rank] > 1

    @property
    def _has_last(self) -> bool:
        return self.plan.num_stages - 1 in self.stages

    def _inputs(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> list[tuple[Tensor, ...]]:
        """Return the micro-batches, checked on every rank that was passed a batch.

        Only ranks of the first stage copy them to their device.
        """
        has_first = 0 in self.stages
        if not has_first and not args and not kwargs:
            return []
        return self._first.microbatches(args, kwargs, are_used=has_first)


def _check_start(plan: Plan) -> None:
    """Refuse a start without other processes, but first a plan that no processes can run."""
    if not dist.is_initialized():
        check_runnable(plan, "processes")
    check_initialised(plan)


def _check_split(split: SplitModel | None, plan: Plan) -> None:
    """Refuse a model that each rank would hold and compute whole, though planned in parts."""
    if split is None or split.divided:
        return
    width = max(stage.tensor for stage in plan.stages)
    reasons = sorted(set(split.reasons.values()))
    why = f" ({list_some(reasons, 3)})" if reasons else ""
    raise PlanMismatch(
        f"the plan splits layers over {width} ranks, but no operation of this model can be split"
        f"{why}; plan with --tensor 1. Modules in an nn.Sequential are called whole where their "
        "forward cannot be traced, or if the profile is older: profile again"
    )


def _check_equal_draws(split: SplitModel | None, keyed_dropout: int | None) -> None:
    if split is not None and split.draws_apart and keyed_dropout is not None:
        raise InvalidInput(
            "ranks draw the dropout of attention for their own heads, which keyed_dropout cannot "
            "make that of other plans; set the dropout of attention to 0, plan with --tensor 1, or "
            "leave keyed_dropout out if there is no other dropout in layers that ranks share"
        )
    if split is not None and split.draws and keyed_dropout is None:
        raise InvalidInput(
            "ranks that share a stage by tensor parallelism must draw equal random numbers, as for "
            "dropout, and each has generators of its own; pass keyed_dropout=SEED, which makes "
            "them depend on the layer, step and micro-batch, or set dropout to 0"
        )


def _check_arguments(
    model: nn.Module,
    plan: Plan,
    loss_fn: LossFunction | None,
    batch_statistics: BatchStatistics,
    schedule: Schedule | None,
) -> None:
    check_module(model)
    check_no_sync_batch_norm(model)
    check_whole_weights(model)
    if loss_fn is not None:
        check_loss_function(loss_fn, model)
    check_policy(batch_statistics)
    check_runnable(plan, "processes")
    if schedule is not None:
        check_schedule(schedule, plan)
