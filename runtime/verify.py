"""Verify a plan: compare one planned step with an unsplit step of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.capture import default_device
from ..capture.equivalence.check import compute_gradient_floor, relative_difference
from ..capture.observation.generation_cache import switch_off_caches
from ..capture.observation.nested_values import list_tensors, map_tensors, replace_tensors
from ..capture.observation.preserve import copy_module, preserve_model
from ..capture.sample import CallStructure, dtype_name
from ..core.errors import InvalidInput, PlanMismatch, StagewrightError
from ..core.plan.plan import Plan
from ..schedules.plan_schedule import schedule_of
from .engine.aux_losses import AuxLoss, AuxLosses, find_aux_losses
from .engine.batch_io import BatchInputs, BatchOutputs, as_scalar_loss
from .engine.emulated_ranks import EmulatedRanks
from .engine.microbatch import split_target
from .partition.cut import cut_for_plan
from .random_state import RandomState
from .replicas.strategy import choose_strategies
from .replicas.sync_batchnorm import check_no_sync_batch_norm
from .supported_plans import check_runnable, check_stateful_layers

LossFunction = Callable[[Any, Any], Tensor]

DOUBLE = torch.float64
"""Double precision separates rounding from errors."""


@dataclass(frozen=True)
class Verification:
    """Differences between a planned and an unsplit step, as norm of difference over norm.

    Attributes:
        loss: Relative difference of the mean loss.
        gradients: Relative difference of each parameter's gradient by name, the largest of all
            ranks that hold it; norms below `GRADIENT_FLOOR` of the largest gradient's count as
            that much. Infinite if only one side has a gradient.
        buffers: Relative difference of each buffer by name, the largest of all ranks.
        missing: Names of the model that no stage holds.
        unknown: Names of stages that the model does not have.
    """

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        text = (
            f"worst difference {self.worst:.2g} (loss {self.loss:.2g}, {len(self.gradients)} "
            f"gradients, {len(self.buffers)} buffers)"
        )
        if self.missing:
            text += f"; no stage holds {', '.join(self.missing)}"
        if self.unknown:
            text += f"; the model does not have {', '.join(self.unknown)}"
        return text

    @property
    def worst(self) -> float:
        """Return the largest difference; infinite if any is NaN."""
        found = [self.loss, *self.gradients.values(), *self.buffers.values()]
        return max(float("inf") if math.isnan(value) else value for value in found)

    def list_largest(self, most: int) -> list[str]:
        """Return the names with the largest differences, each with its difference."""
        found = [("loss", self.loss), *self.gradients.items(), *self.buffers.items()]
        found.sort(key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1], reverse=True)
        return [f"{name} {value:.2g}" for name, value in found[:most]]

    def equal(self, tolerance: float) -> bool:
        """Return True if no name is missing and all differences are at most ``tolerance``."""
        return not self.missing and not self.unknown and self.worst <= tolerance


def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    target: Any,
    loss_fn: LossFunction,
    *,
    dtype: torch.dtype | None = None,
    aux_losses: AuxLosses | None = None,
) -> Verification:
    """Run one step of the model unsplit and one as planned, and compare them.

    The planned step is that of the plan's processes, emulated in one: each rank's actions in its
    schedule's order with as many micro-batches in flight, replicas as copies, recomputation,
    backwards in two parts and messages between detached tensors (`engine.emulated_ranks`). A
    forward-only plan is run in evaluation mode.

    The unsplit model runs the plan's micro-batches too, because batch normalisation takes its
    statistics from each of them. So the differences are those of splitting the model alone.

    Args:
        model: The model, which is copied and not changed.
        plan: The plan to verify.
        batch: A whole batch: one argument, a tuple of them, or a dict of keywords.
        target: A tensor or a nest of tensors, split like the batch.
        loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch.
        dtype: Dtype of both copies and floating inputs; ``torch.float64`` tells rounding apart.
        aux_losses: See `DistributedPipeline`.

    Raises:
        InvalidInput: The batch is not the plan's, or the model has an ``nn.SyncBatchNorm``.
        PlanMismatch: The plan is for another model, reorders or splits its layers, or its step
            fails though the unsplit one does not; the message names the action.
    """
    check_no_sync_batch_norm(model)
    _check_whole_layers(plan)
    schedule = schedule_of(plan)
    choose_strategies(plan, schedule, None)
    trains = plan.schedule != "forward_only"
    whole, parts = (copy_model(model, dtype, trains=trains) for _ in range(2))
    if dtype is not None:
        plan, (batch, target) = with_input_dtype(plan, dtype), convert((batch, target), dtype)
    device = default_device(parts)
    pieces = cut_for_plan(parts, plan, direct=True)
    check_stateful_layers(pieces.captured.graph.layers, plan, schedule)
    captured, last, structure = pieces.captured, pieces.stages[-1], pieces.structure
    outputs = BatchOutputs(captured, loss_fn, plan.num_microbatches, device, last)
    losses = find_aux_losses(pieces, aux_losses) if trains else []
    ranks = EmulatedRanks(
        pieces, plan, schedule, loss=outputs.compute_loss_share, device=device, aux_losses=losses
    )
    inputs = BatchInputs(plan, structure, device).microbatches(*structure.split_call(batch))
    targets = split_target(outputs.move_target(target), plan.num_microbatches)
    # Both steps start from the same random state and leave the generators as they found them.
    with preserve_model(model), torch.set_grad_enabled(trains), switch_off_caches(whole):
        loss_fn = _with_aux_losses(whole, loss_fn, losses)
        expected, random = _run_unsplit(whole, structure, loss_fn, device, inputs, targets)
    with preserve_model(model), torch.enable_grad():
        loss = _run_emulated(ranks, inputs, targets, random, trains=trains)
    return _compare(whole, ranks.modules, expected, loss)


def _check_whole_layers(plan: Plan) -> None:
    split = [index for index, stage in enumerate(plan.stages) if stage.tensor > 1]
    if split:
        raise PlanMismatch(
            f"stage {split[0]} splits its layers over {plan.stages[split[0]].tensor} devices, and "
            "one process does not; verify it with 'stagewright verify', which starts processes, "
            "or call stagewright.runtime.verify_distributed.verify_distributed on every rank"
        )
    check_runnable(plan, "one device")


def _run_emulated(
    ranks: EmulatedRanks,
    inputs: Sequence[Sequence[Tensor]],
    targets: Sequence[Any],
    random: Mapping[int, RandomState],
    *,
    trains: bool,
) -> float:
    """Run the emulated step; raise `PlanMismatch` for a failure, as the unsplit step succeeded."""
    run = ranks.train if trains else ranks.evaluate
    try:
        return run(inputs, targets, random)
    except StagewrightError:
        raise
    except Exception as error:
        raise explain_failure(error, ranks.current_activity) from error


def seed_generators(seed: int) -> None:
    """Seed torch's generators, for reproducible weights and synthetic data."""
    torch.manual_seed(seed)


def _run_unsplit(
    model: nn.Module,
    structure: CallStructure,
    loss_fn: LossFunction,
    device: torch.device,
    batches: Sequence[Sequence[Tensor]],
    targets: Sequence[Any],
) -> tuple[float, dict[int, RandomState]]:
    """Return the mean loss and the random state before each micro-batch; accumulate gradients."""
    total, random = 0.0, {}
    for index, (flat, target) in enumerate(zip(batches, targets, strict=True)):
        random[index] = RandomState.now(device)
        # Cloned: micro-batches are views of the batch, and the model may work in place.
        args, kwargs = structure.unflatten([tensor.clone() for tensor in flat])
        there = map_tensors(lambda value: value.to(device), target)
        loss = as_scalar_loss(loss_fn(model(*args, **kwargs), there)) / len(batches)
        if torch.is_grad_enabled():
            loss.backward()
        total += float(loss.detach())
    return total, random


def copy_model(model: nn.Module, dtype: torch.dtype | None, *, trains: bool) -> nn.Module:
    """Copy a model in another dtype, in evaluation mode unless it trains."""
    made = copy_module(model)
    made = made if dtype is None else made._apply(lambda tensor: convert(tensor, dtype))
    return made if trains else made.eval()


def _with_aux_losses(
    model: nn.Module, loss_fn: LossFunction, losses: Sequence[Sequence[AuxLoss]]
) -> LossFunction:
    """Add to a loss what the unsplit model's modules left in their attributes."""
    sources = [(model.get_submodule(a.path), a) for stage in losses for a in stage]

    def whole_loss(output: Any, target: Any) -> Tensor:
        loss = as_scalar_loss(loss_fn(output, target))
        for module, aux in sources:
            loss = loss + aux.weight * getattr(module, aux.name).reshape(())
        return loss

    return whole_loss


def explain_failure(error: Exception, activity: str) -> PlanMismatch:
    """Return the error for stages that fail in a step that the unsplit model runs."""
    first = str(error).strip().partition("\n")[0]
    message = (
        f"the unsplit model runs this step, but its stages fail at {activity}: "
        f"{type(error).__name__}: {first}"
    )
    if "modified by an inplace operation" in str(error):
        return PlanMismatch(
            f"{message}. A buffer is changed in place before the backward of an earlier "
            "micro-batch reads it; let the forward read a copy (buffer.clone()), or plan with a "
            "single micro-batch in flight (--microbatches 1)"
        )
    return PlanMismatch(f"{message}. Please report this together with the plan")


def _compare(
    whole: nn.Module, ranks: Sequence[nn.Module], unsplit_loss: float, parts_loss: float
) -> Verification:
    found = {name for rank in ranks for name in rank.state_dict()}
    wanted = set(whole.state_dict())
    parameters = [dict(rank.named_parameters(remove_duplicate=False)) for rank in ranks]
    buffers = [dict(rank.named_buffers(remove_duplicate=False)) for rank in ranks]
    floor = compute_gradient_floor(p.grad for p in whole.parameters() if p.grad is not None)
    gradients = {
        name: max((difference_of(p.grad, expected.grad, floor) for p in copies), default=0.0)
        for name, expected, copies in _match_tensors(whole, parameters, "named_parameters")
        if expected.grad is not None or any(copy.grad is not None for copy in copies)
    }
    return Verification(
        loss=abs(parts_loss - unsplit_loss) / max(abs(unsplit_loss), 1e-30),
        gradients=gradients,
        buffers={
            name: max((relative_difference(b, expected) for b in copies), default=0.0)
            for name, expected, copies in _match_tensors(whole, buffers, "named_buffers")
        },
        missing=tuple(sorted(wanted - found)),
        unknown=tuple(sorted(found - wanted)),
    )


def _match_tensors(
    whole: nn.Module, ranks: Sequence[Mapping[str, Tensor]], kind: str
) -> list[tuple[str, Tensor, list[Tensor]]]:
    """Return each tensor of the unsplit model with its copies, under any name, on all ranks."""
    names: dict[int, list[str]] = {}
    first: dict[str, Tensor] = {}
    for name, tensor in getattr(whole, kind)(remove_duplicate=False):
        if id(tensor) not in names:
            first[name] = tensor
        names.setdefault(id(tensor), []).append(name)
    return [
        (name, tensor, [r[other] for r in ranks for other in names[id(tensor)] if other in r])
        for name, tensor in first.items()
    ]


def difference_of(ours: Tensor | None, theirs: Tensor | None, floor: float) -> float:
    """Return the relative difference of two gradients; infinite if only one is there."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    # Some may be sparse.
    return relative_difference(ours.to_dense(), theirs.to_dense(), floor=floor)


def with_input_dtype(plan: Plan, dtype: torch.dtype) -> Plan:
    """Return the plan with floating inputs of another dtype."""
    inputs = tuple(
        spec.model_copy(update={"dtype": dtype_name(_widen(getattr(torch, spec.dtype), dtype))})
        for spec in plan.inputs
    )
    return plan.model_copy(update={"inputs": inputs})


def convert(values: Any, dtype: torch.dtype) -> Any:
    """Convert the floating and complex tensors of a nest."""
    return map_tensors(lambda t: t.to(_widen(t.dtype, dtype)), values)


def _widen(old: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return a tensor's dtype where floating ones become ``dtype``."""
    return dtype.to_complex() if old.is_complex else dtype if old.is_floating_point else old


def join_samples(samples: Sequence[Any]) -> Any:
    """Join micro-batches to a batch: tensors of any nest along their first dimension."""
    columns = zip(*(list_tensors(sample) for sample in samples), strict=True)
    return replace_tensors(samples[0], [torch.cat(parts) for parts in columns])


def mean_of_squares(output: Any, target: Tensor) -> Tensor:
    """Return the mean square of all floating outputs, as a loss that ignores the target.

    Raises:
        InvalidInput: The model has no floating output.
    """
    found = [value.square().mean() for value in list_tensors(output) if value.is_floating_point()]
    if not found:
        raise InvalidInput("the model returns no floating tensor; pass a loss and a target")
    return torch.stack(found).sum()


def make_dummy_target(num_samples: int) -> Tensor:
    """Return a target for `mean_of_squares`, with one entry per sample."""
    return torch.zeros(num_samples)
