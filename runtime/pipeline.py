"""Training pipeline in one process, with stages on one or several devices."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ..capture.capture import default_device
from ..capture.program.segment import Segment, adopt_buffers
from ..capture.sample import check_module
from ..core.errors import InvalidInput, PlanMismatch
from ..core.plan.plan import Plan
from .batchnorm.deferred import deferred_statistics
from .batchnorm.running_statistics import BatchStatistics, check_policy, check_statistics_reachable
from .engine.aux_losses import AuxLosses, AuxLossReader, find_aux_losses
from .engine.keyed_dropout import keyed_dropout as keyed
from .engine.microbatch import join_outputs, split_batch
from .engine.stage import autocast_to
from .local.checkpoint_state import is_checkpointing, is_recomputing
from .local.layer_checkpoints import LayerCheckpoints
from .local.run import LocalStage, run_stages
from .local.streams import CopyStreams, full_device
from .partition.cut import CutModel, check_no_references, cut_for_plan
from .partition.model_snapshot import ModelSnapshot
from .partition.precision import PrecisionCheck
from .random_state import preserve_random_state
from .supported_plans import check_runnable, check_stateful_layers

CheckpointMode = Literal["always", "except_last", "never"]
"""Selects the micro-batches that keep only their inputs and are recomputed in the backward."""

StageMode = CheckpointMode | Literal["layers"]
"""What a stage recomputes: some micro-batches as a whole, or the layers that its plan names."""


StageFunction = Callable[[int, tuple[Any, ...]], tuple[Any, ...]]


class Pipeline(nn.Module):
    """Model run stage by stage and micro-batch by micro-batch, in GPipe's clock order.

    It holds the model's own parameters and buffers under their names, is called like the model, and
    is differentiated like it: the backward pass runs through all stages. Its length is the number
    of stages, its items are the stages. Given several devices, stage ``s`` runs on the ``s``-th,
    and they work at the same time (Huang et al. 2019, section 2.3). Schedules do not change
    results, so plans of any schedule run in this order; see `supported_plans` for those refused.

    An error in a stage is raised with a note that names the stage and micro-batch.

    A copy (`copy.deepcopy`, `pickle`) is a pipeline of a copy of the model, captured again. Hooks
    on the pipeline itself, rather than on the model's modules, are not copied.

    Args:
        model: The model the plan was made for. Its modules are used, not copied.
        plan: Where to cut, and into how many micro-batches to split a batch.
        devices: One device, or one per stage; `None` leaves the model where it is.
        sample: See `cut_for_plan`.
        chunks: Micro-batches per batch, instead of the plan's number. A batch with fewer samples is
            split into fewer, one that does not divide into unequal ones.
        checkpoint: Which micro-batches to recompute in the backward, on all stages; `None` follows
            the plan's stages. In training mode only.
        batch_statistics: Whether running statistics of batch normalisation move once per
            micro-batch or, with ``deferred``, once per batch by the statistics of all of it.
        keyed_dropout: A seed that makes dropout depend on the layer, step and micro-batch alone,
            and not on the plan (`engine.keyed_dropout`); `None` to draw masks as they come.
        aux_losses: Attributes in which modules leave losses (`engine.aux_losses`); add `aux_loss`
            to the loss.

    Attributes:
        aux_loss: Weighted sum of the auxiliary losses of the last batch, each a mean over its
            micro-batches; 0 in evaluation mode.
        plan: As given.
        steps: Batches run in training mode, which keyed dropout follows; set it when resuming.
        accepts_loss_kwargs: False, which tells Hugging Face's ``Trainer`` to pass the batch alone
            and no ``num_items_in_batch``, whatever the signature of the model's forward allows.

    Raises:
        PlanMismatch: The plan is for another model, or cannot be run in one process.
        InvalidInput: The number of devices is neither one nor the number of stages, or another
            argument is invalid.
    """

    accepts_loss_kwargs = False

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        devices: Sequence[torch.device | str] | None = None,
        sample: Any = None,
        chunks: int | None = None,
        checkpoint: CheckpointMode | None = None,
        batch_statistics: BatchStatistics = "microbatch",
        keyed_dropout: int | None = None,
        aux_losses: AuxLosses | None = None,
    ) -> None:
        super().__init__()
        check_module(model)
        spread = devices is not None and len(devices) > 1
        check_runnable(plan, "devices" if spread else "one device")
        self.plan = plan
        self._num_microbatches = _choose_chunks(plan, chunks)
        self._checkpoint = _choose_modes(plan, checkpoint)
        options = {
            "devices": devices, "sample": sample, "chunks": chunks, "checkpoint": checkpoint,
            "batch_statistics": batch_statistics, "keyed_dropout": keyed_dropout,
            "aux_losses": aux_losses,
        }  # fmt: skip
        self._origin = _Origin.now(model, plan, options)
        pieces = cut_for_plan(model, plan, sample)
        if spread:
            check_no_references(pieces, "on another device")
            _check_no_tied_checkpoints(pieces, self._checkpoint)
        again = [at for at, mode in enumerate(self._checkpoint) if mode not in ("never", "layers")]
        check_stateful_layers(pieces.captured.graph.layers, plan, recomputed=again)
        # Not as a submodule: parameters would appear a second time, under the stages' names.
        object.__setattr__(self, "_pieces", pieces)
        self._fixed_inputs = pieces.captured.fixed_inputs
        self._precision = PrecisionCheck(pieces.captured) if self._fixed_inputs else None
        self._changes_input = pieces.captured.mutates_inputs(0, plan.balance[0])
        self._deferred = check_policy(batch_statistics) == "deferred"
        if batch_statistics == "synchronised":
            raise InvalidInput(
                "batch_statistics='synchronised' is for replicas, and a single process has none; "
                "use larger micro-batches, or run the plan in processes (DistributedPipeline)"
            )
        if self._deferred:
            check_statistics_reachable(pieces.captured.program, pieces.stages)
        self._dropout_seed = keyed_dropout
        self._aux = [
            AuxLossReader(stage, losses) if losses else None
            for stage, losses in zip(
                pieces.stages, find_aux_losses(pieces, aux_losses), strict=True
            )
        ]
        self._layers = _make_checkpoints(pieces, self._checkpoint)
        self.aux_loss = torch.zeros(())
        self.steps = 0
        self._devices = _place_stages(pieces, devices, model)
        self._streams = CopyStreams()
        self._share_names(model)
        self._snapshot = ModelSnapshot(pieces.captured)
        self._share_signature(model)
        self.training = model.training

    _pieces: CutModel

    @property
    def microbatch_size(self) -> int | None:
        """Return the fixed number of samples per micro-batch; `None` for any number."""
        return self._fixed_inputs[0].shape[0] if self._fixed_inputs else None

    def _share_names(self, model: nn.Module) -> None:
        """Register the model's children, parameters and buffers under their own names."""
        # Not by add_module, register_parameter and register_buffer, which refuse the name of any
        # attribute there is: models have children named "stages" or "plan", too.
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set |= model._non_persistent_buffers_set
        self._shared = dict(self._modules)

    def _check_children(self) -> None:
        """Check that nobody replaced a child here, where no stage would see it."""
        for name, child in self._shared.items():
            if self._modules.get(name) is not child:
                raise PlanMismatch(
                    f"{name!r} was replaced on this pipeline, whose stages still run the old one; "
                    "replace it on the model, then build the pipeline and its optimizer again"
                )

    def _share_signature(self, model: nn.Module) -> None:
        """Let ``inspect.signature`` of ``forward`` be the model's, by which trainers go."""
        signature = inspect.signature(model.forward)
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

        def forward(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *args, **kwargs)

        vars(forward)["_torchdynamo_disable"] = True
        vars(forward)["__signature__"] = signature.replace(
            parameters=[this, *signature.parameters.values()]
        )
        # A bound method, as Accelerate wraps its ``__func__`` for mixed precision.
        vars(self)["forward"] = MethodType(forward, self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled stages and their graphs refer to the model in ways that neither pickle nor
        # deepcopy can follow. So a copy is built like the original, from a copy of the model.
        model = self._pieces.captured.program.model
        # `to` may have replaced tensors of the root here, and not in the model.
        root = (dict(self._parameters), dict(self._buffers))
        state = (root, _read_modes(model), self.training, self.steps)
        return _rebuild, (type(self), model, self._origin, *state)

    @property
    def stages(self) -> tuple[Segment, ...]:
        """Return the stages in order."""
        return self._pieces.stages

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: int) -> Segment:
        return self.stages[index]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.stages)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run a batch.

        Returns:
            The model's output for the whole batch: tensors concatenated over micro-batches along
            their first dimension, scalars averaged over samples.

        Raises:
            PlanMismatch: The model was changed after the pipeline was built, or its forward differs
                in the precision it has now.
            InvalidInput: The batch does not split into micro-batches, its samples have another
                shape or kind of numbers than those the model was captured with, or outputs cannot
                be joined because their first dimension is not the micro-batch.
        """
        run = self._run_batch
        if "torch._dynamo" in sys.modules:  # it cannot trace the stages' threads and streams
            run = torch._dynamo.disable(run)
        return run(args, kwargs)

    vars(forward)["_torchdynamo_disable"] = True

    def _run_batch(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        self._check_children()
        self._snapshot.check(training=self.training)
        structure = self._pieces.structure
        flat = structure.flatten(args, kwargs)
        count = self._num_microbatches
        if self.microbatch_size and flat[0].dim():  # a smaller batch is fewer micro-batches
            count = max(1, min(count, len(flat[0]) // self.microbatch_size))
        batches = split_batch(flat, count, self._fixed_inputs, structure.names, is_converted=True)
        if self._precision is not None:
            self._precision.run(batches[0])
        with deferred_statistics(self) if self._deferred else nullcontext():
            values = run_stages(self._local_stages(len(batches)), batches)
        vars(self)["steps"] += self.training
        joined = join_outputs(values, [len(batch[0]) for batch in batches])
        count = len(self._pieces.captured.program.flat_outputs)
        # Not by setattr, here and above: the model may have a child or buffer of that name.
        place = next((v.device for v in joined if isinstance(v, Tensor)), None)
        losses = (loss.to(place) for loss in joined[count:])
        vars(self)["aux_loss"] = sum(losses, torch.zeros(()))
        return self._pieces.captured.unflatten_output(joined[:count])

    def _local_stages(self, num_microbatches: int) -> list[LocalStage]:
        recomputed = {"always": num_microbatches, "except_last": num_microbatches - 1}
        places = self._streams.stage_devices(self._devices)
        key = None if self._dropout_seed is None else (self._dropout_seed, self.steps)
        found: list[LocalStage] = []
        for index, (stage, place, mode) in enumerate(
            zip(self.stages, places, self._checkpoint, strict=True)
        ):
            aux = self._aux[index] if self.training else None
            copies = _TiedCopies(stage, place.device)
            drawn = key if self.training else None
            layers = self._layers.get(index) if self.training else None
            function = partial(_run_stage, stage, copies, place.device, drawn, aux, layers)
            if self._changes_input and not found:
                function = partial(_run_on_copies, function)
            checkpointed = recomputed.get(mode, 0) if self.training else 0
            leaves = () if aux is None else (("aux_loss", index),)
            found.append(LocalStage(function, stage, place, checkpointed, leaves=leaves))
        return found

    def train(self, mode: bool = True) -> Self:
        """Switch training or evaluation mode.

        Raises:
            PlanMismatch: The captured model has operations frozen in the other mode.
        """
        for stage in self._pieces.stages:
            stage.train(mode)
        self._pieces.captured.program.model.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for stage in self._pieces.stages:
            stage.apply_to_constants(fn)
            adopt_buffers(stage, self)
        # Of the model itself only submodules are shared with the pipeline.
        adopt_buffers(self._pieces.captured.program.model, self)
        self._snapshot.remember_tensors()
        return self


@dataclass(frozen=True)
class _Origin:
    """Arguments and circumstances of a pipeline's construction, to build its copies.

    ``device`` is the model's, ``autocast`` the dtype of the autocast region around it, ``modes``
    are those of the model's modules.
    """

    plan: Plan
    options: dict[str, Any]
    device: torch.device
    autocast: torch.dtype | None
    modes: dict[str, bool]

    @classmethod
    def now(cls, model: nn.Module, plan: Plan, options: dict[str, Any]) -> _Origin:
        device = default_device(model)
        is_cast = torch.is_autocast_enabled(device.type)
        autocast = torch.get_autocast_dtype(device.type) if is_cast else None
        return cls(plan, options, device, autocast, _read_modes(model))


def _read_modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _write_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)


def _rebuild(
    kind: type[Pipeline],
    model: nn.Module,
    origin: _Origin,
    root: tuple[dict[str, Any], dict[str, Any]],
    modes: Mapping[str, bool],
    training: bool,
    steps: int,
) -> Pipeline:
    """Build a copy of a pipeline from a copy of its model, in the modes it was in."""
    model._parameters.update(root[0])
    model._buffers.update(root[1])
    _write_modes(model, origin.modes)
    # Back from the stages' devices to the one it was captured on.
    model.to(origin.device)
    with preserve_random_state(origin.device), autocast_to(origin.device, origin.autocast):
        made = kind(model, origin.plan, **origin.options)
    if made.training != training:
        made.train(training)
    _write_modes(model, modes)
    vars(made)["steps"] = steps
    return made


class _TiedCopies:
    """Copies of a stage's weights that live on other devices, made once a forward.

    A tied weight lives on its first stage's device. With copies it stays a single parameter, and
    autograd sends their gradients back to it.
    """

    def __init__(self, stage: Segment, device: torch.device | None) -> None:
        self._stage, self._device = stage, device
        self._trains = torch.is_grad_enabled()
        self._made: dict[str, Tensor] | None = None

    def get(self) -> dict[str, Tensor]:
        """Return the copies by name, made on the current stream when first asked for."""
        if self._made is None:
            # Also for a first run that keeps no graph: its recomputation needs that of the copy.
            with torch.set_grad_enabled(self._trains):
                self._made = {
                    name: parameter.to(self._device)
                    for name, parameter in self._stage.named_parameters()
                    if self._device is not None and parameter.device != self._device
                }
        return self._made


def _run_stage(
    stage: Segment,
    copies: _TiedCopies,
    device: torch.device | None,
    key: tuple[int, int] | None,
    aux: AuxLossReader | None,
    layers: LayerCheckpoints | None,
    microbatch: int,
    inputs: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Run a stage, with keyed dropout if there is a seed and step; its own losses come last."""
    elsewhere = copies.get()
    with ExitStack() as stack:
        if layers is not None:
            stack.enter_context(layers.active())
        if key is not None:
            seed, step = key
            stack.enter_context(
                keyed(stage, seed=seed, step=step, microbatch=microbatch, device=device)
            )
        run = (
            partial(torch.func.functional_call, stage, elsewhere, inputs)
            if elsewhere
            else partial(stage, *inputs)
        )
        if aux is None:
            return tuple(run())
        outputs, loss = aux.run(run)
        return (*outputs, loss)


def _run_on_copies(
    function: StageFunction, microbatch: int, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run a first stage that works in place on copies of its inputs, if it will be recomputed.

    A recomputation needs the inputs unchanged. Later stages always work on copies
    (`boundary.enter_copy`).
    """
    if is_checkpointing() or is_recomputing():
        inputs = tuple(v.clone() if isinstance(v, Tensor) else v for v in inputs)
    return function(microbatch, inputs)


def _make_checkpoints(pieces: CutModel, modes: Sequence[StageMode]) -> dict[int, LayerCheckpoints]:
    return {
        index: LayerCheckpoints(stage, stage)
        for index, (stage, mode) in enumerate(zip(pieces.stages, modes, strict=True))
        if mode == "layers"
    }


def _check_no_tied_checkpoints(pieces: CutModel, modes: Sequence[StageMode]) -> None:
    """Raise `PlanMismatch` where a checkpointed layer would miss the copy of a tied weight."""
    found = [
        group for group in pieces.tied if any(modes[stage] == "layers" for stage in group.stages)
    ]
    if found:
        raise PlanMismatch(
            f"stages {', '.join(map(str, found[0].stages))} share {found[0].names[0]!r} and "
            "recompute layer by layer, which one process cannot do on several devices; plan with "
            "recompute='auto', or run the plan with stagewright.DistributedPipeline"
        )


def _choose_chunks(plan: Plan, chunks: int | None) -> int:
    if chunks is None:
        return plan.num_microbatches
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise InvalidInput(f"chunks is {chunks!r}; use a positive number of micro-batches")
    return chunks


def _choose_modes(plan: Plan, checkpoint: CheckpointMode | None) -> tuple[StageMode, ...]:
    """Return each stage's checkpoint mode."""
    if checkpoint is None:
        return tuple(stage.recompute for stage in plan.stages)
    if checkpoint not in get_args(CheckpointMode):
        raise InvalidInput(
            f"checkpoint is {checkpoint!r}; give one of {', '.join(get_args(CheckpointMode))}"
        )
    return (checkpoint,) * plan.num_stages


def _place_stages(
    pieces: CutModel, devices: Sequence[torch.device | str] | None, model: nn.Module
) -> list[torch.device | None]:
    count = len(pieces.stages)
    if devices is None:
        return [None] * count
    if len(devices) not in (1, count):
        raise InvalidInput(f"pass one device, or {count}, one per stage; got {len(devices)}")
    placed = [full_device(device) for device in devices] * (1 if len(devices) == count else count)
    for stage, device in reversed(list(zip(pieces.stages, placed, strict=True))):
        stage.to(device)  # last to first, so that a tied weight ends on its first stage's device
        stage.export_buffers(model)
    return list(placed)
