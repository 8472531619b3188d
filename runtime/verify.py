"""Does a plan compute what the model computes? One step, as planned, against one unsplit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture.capture import default_device
from ..capture.equivalence.check import relative_difference
from ..capture.observation.preserve import preserve_model
from ..capture.sample import CallStructure
from ..core.errors import InvalidInput, PlanMismatch, StagewrightError
from ..core.plan.plan import Plan
from ..schedules.plan_schedule import schedule_of
from .engine.batch_io import BatchInputs, BatchOutputs, as_scalar_loss
from .engine.emulated_ranks import EmulatedRanks
from .engine.microbatch import split_target
from .partition.cut import cut_for_plan
from .random_state import RandomState
from .replicas.strategy import choose_strategies
from .replicas.sync_batchnorm import check_no_sync_batch_norm
from .supported_plans import check_runnable

LossFunction = Callable[[Any, Any], Tensor]

DOUBLE = torch.float64
"""In double precision rounding is told apart from error."""


@dataclass(frozen=True)
class Verification:
    """How far a split step is from the unsplit one (norm of difference over norm).

    Attributes:
        loss: Relative difference of the mean loss.
        gradients: Relative difference of each parameter's gradient, by name; of several ranks that
            hold it the largest. Infinite if only one side has any.
        buffers: Relative difference of each buffer, by name, likewise.
        missing: Names of the model that no stage holds.
        unknown: Names of stages that the model does not have.
    """

    loss: float
    gradients: dict[str, float]
    buffers: dict[str, float]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        names = f"missing {list(self.missing)}, unknown {list(self.unknown)}"
        return (
            f"worst difference {self.worst:.2g} (loss {self.loss:.2g}, {len(self.gradients)} "
            f"gradients, {len(self.buffers)} buffers), {names}"
        )

    @property
    def worst(self) -> float:
        """The largest difference of all; infinite if any is not a number."""
        found = [self.loss, *self.gradients.values(), *self.buffers.values()]
        return max(float("inf") if math.isnan(value) else value for value in found)

    def equal(self, tolerance: float) -> bool:
        """Whether every name is there and every difference within ``tolerance``."""
        return not self.missing and not self.unknown and self.worst <= tolerance


def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    target: Any,
    loss_fn: LossFunction,
    *,
    dtype: torch.dtype | None = None,
) -> Verification:
    """Run one step of copies of the model, whole and as the plan says, and compare.

    The plan's step is that of its processes, in one process: every rank's actions in the order of
    its schedule, with as many micro-batches in flight, replicas as copies, recomputation, backwards
    in two parts and messages between detached tensors (`runtime.rehearsal`). A plan of forwards
    alone is evaluated, in evaluation mode.

    The unsplit model sees the batch in the plan's micro-batches too: batch normalisation takes its
    statistics from each, and a loss is the mean over micro-batches, so this is what splitting alone
    changes.

    Args:
        model: The model; it is copied, not changed.
        plan: The plan to try.
        batch: A whole batch: a tensor, a tuple or a dict of keyword tensors.
        target: Split like the batch; a tensor or a nest of them.
        loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch.
        dtype: Convert both copies and floating inputs first; ``torch.float64`` tells rounding
            apart from error.

    Raises:
        InvalidInput: The batch is not the plan's, or the model has an ``nn.SyncBatchNorm``.
        PlanMismatch: The plan is for another model, reorders its layers, or its step fails where
            the unsplit model's does not; the message says at which action.
    """
    check_no_sync_batch_norm(model)
    check_runnable(plan, "processes")
    schedule = schedule_of(plan)
    choose_strategies(plan, schedule, None)
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    trains = plan.schedule != "forward_only"
    if not trains:
        whole.eval()
        parts.eval()
    if dtype is not None:
        whole, parts, plan = whole.to(dtype), parts.to(dtype), _of_dtype(plan, dtype)
        batch, target = _converted(batch, dtype), _converted(target, dtype)
    device = default_device(parts)
    pieces = cut_for_plan(parts, plan, direct=True)
    last = BatchOutputs(pieces.captured, loss_fn, plan.num_microbatches, device, (0,), None)
    rehearsal = EmulatedRanks(pieces, plan, schedule, loss=last.compute_loss_share, device=device)
    args, kwargs = _call(batch)
    batches = BatchInputs(plan, pieces.structure, device).microbatches(args, kwargs)
    targets = split_target(target, plan.num_microbatches)
    step = _WholeStep(whole, pieces.structure, loss_fn, device)
    with preserve_model(model), torch.set_grad_enabled(trains):
        reduce_loss = step.take(batches, targets)
    with preserve_model(model), torch.enable_grad():
        run = rehearsal.train if trains else rehearsal.evaluate
        try:
            loss = run(batches, targets, step.draws)
        except StagewrightError:
            raise
        except Exception as error:
            raise _explained(error, rehearsal.current_activity) from error
    return _compare(whole, rehearsal.modules, reduce_loss, loss)


def seed_generators(seed: int) -> None:
    """Make what is drawn from here on the same every time: weights, and made-up data."""
    torch.manual_seed(seed)


class _WholeStep:
    """A step of the unsplit model.

    Attributes:
        draws: The random state in front of each micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: CallStructure,
        loss_fn: LossFunction,
        device: torch.device,
    ) -> None:
        self._model, self._structure, self._loss_fn = model, structure, loss_fn
        self._device = device
        self.draws: dict[int, RandomState] = {}

    def take(self, batches: Sequence[Sequence[Tensor]], targets: Sequence[Any]) -> float:
        """The mean loss; gradients too, unless they are switched off."""
        total = 0.0
        for index, (flat, target) in enumerate(zip(batches, targets, strict=True)):
            self.draws[index] = RandomState.now(self._device)
            args, kwargs = self._structure.unflatten([tensor.clone() for tensor in flat])
            there = pytree.tree_map_only(Tensor, lambda value: value.to(self._device), target)
            loss = as_scalar_loss(self._loss_fn(self._model(*args, **kwargs), there)) / len(batches)
            if torch.is_grad_enabled():
                loss.backward()
            total += float(loss.detach())
        return total


def _explained(error: Exception, doing: str) -> PlanMismatch:
    """What to say of a step that fails in stages alone."""
    first = str(error).strip().partition("\n")[0]
    message = (
        f"the unsplit model takes this step, but its stages fail at {doing}: "
        f"{type(error).__name__}: {first}"
    )
    if "modified by an inplace operation" in str(error):
        return PlanMismatch(
            f"{message}. A buffer is changed in place while the backward of an earlier micro-batch "
            "still has to read it; let the forward read a copy (buffer.clone()), or plan so that "
            "one micro-batch is in flight (--microbatches 1)"
        )
    return PlanMismatch(f"{message}. Please report it with the plan")


def _compare(
    whole: nn.Module, ranks: Sequence[nn.Module], reduce_loss: float, parts_loss: float
) -> Verification:
    found = {name for rank in ranks for name in rank.state_dict()}
    wanted = set(whole.state_dict())
    parameters = [dict(rank.named_parameters(remove_duplicate=False)) for rank in ranks]
    buffers = [dict(rank.named_buffers(remove_duplicate=False)) for rank in ranks]
    gradients = {
        name: max((_apart(p.grad, expected.grad) for p in copies), default=0.0)
        for name, expected, copies in _beside(whole, parameters, "named_parameters")
        if expected.grad is not None or any(copy.grad is not None for copy in copies)
    }
    return Verification(
        loss=abs(parts_loss - reduce_loss) / max(abs(reduce_loss), 1e-30),
        gradients=gradients,
        buffers={
            name: max((relative_difference(b, expected) for b in copies), default=0.0)
            for name, expected, copies in _beside(whole, buffers, "named_buffers")
        },
        missing=tuple(sorted(wanted - found)),
        unknown=tuple(sorted(found - wanted)),
    )


def _beside(
    whole: nn.Module, ranks: Sequence[Mapping[str, Tensor]], kind: str
) -> list[tuple[str, Tensor, list[Tensor]]]:
    """Each tensor of the unsplit model with those that ranks hold under any of its names."""
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


def _apart(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return relative_difference(ours, theirs)


def _of_dtype(plan: Plan, dtype: torch.dtype) -> Plan:
    name = str(dtype).removeprefix("torch.")
    inputs = tuple(
        spec.model_copy(update={"dtype": name})
        if spec.dtype.startswith(("float", "bfloat"))
        else spec
        for spec in plan.inputs
    )
    return plan.model_copy(update={"inputs": inputs})


def _converted(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nest in another dtype."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values
    )


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def join_samples(samples: Sequence[Any]) -> Any:
    """Micro-batches as one batch: tensors of any nest, along their first dimension."""

    def joined(*parts: Any) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return pytree.tree_map(joined, *samples)


def mean_of_squares(output: Any, target: Tensor) -> Tensor:
    """A loss that reaches every floating output; the target is not looked at.

    Raises:
        InvalidInput: There is none.
    """
    found = [
        value.square().mean()
        for value in pytree.tree_leaves(output)
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    if not found:
        raise InvalidInput("the model returns no floating tensor; give a loss and its target")
    return torch.stack(found).sum()


def make_dummy_target(num_samples: int) -> Tensor:
    """For `mean_of_squares`: one entry a sample."""
    return torch.zeros(num_samples)
