"""Does a plan compute what the model computes? One step, split against unsplit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.difference import relative_difference
from ..capture.pieces import PieceRun
from ..capture.state import preserved
from ..core.plan import Plan
from .cut import CutModel, cut_for_plan
from .microbatch import split_batch
from .runnable import check_runnable

LossFunction = Callable[[Any, Tensor], Tensor]

DOUBLE = torch.float64
"""In double precision rounding is told apart from error."""


@dataclass(frozen=True)
class Verification:
    """How far a split step is from the unsplit one (norm of difference over norm).

    Attributes:
        loss: Relative difference of the mean loss.
        gradients: Relative difference of each parameter's gradient, by name.
        buffers: Relative difference of each buffer, by name.
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
    target: Tensor,
    loss_fn: LossFunction,
    *,
    dtype: torch.dtype | None = None,
) -> Verification:
    """Run one step of copies of the model, whole and in the plan's stages, and compare.

    Both see the batch in the plan's micro-batches: batch normalisation takes its statistics from
    each, and a loss is the mean over micro-batches, so this is what splitting alone changes.

    Every stage receives detached tensors and hands gradients back by hand, as it would between
    machines; tied gradients are summed as the distributed runtime sums them.

    Args:
        model: The model; it is copied, not changed.
        plan: The plan to try.
        batch: A whole batch: a tensor, a tuple or a dict of keyword tensors.
        target: Split like the batch.
        loss_fn: ``loss_fn(output, target)``, a mean over its micro-batch.
        dtype: Convert both copies and floating inputs first; ``torch.float64`` tells rounding
            apart from error.

    Raises:
        PlanMismatch: The plan is for another model, or reorders its layers; all else that a plan
            may use changes no number.
    """
    check_runnable(plan, "one device")
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    if dtype is not None:
        whole, parts = whole.to(dtype), parts.to(dtype)
        plan = plan.model_copy(
            update={
                "inputs": tuple(
                    spec.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
                    if spec.dtype.startswith(("float", "bfloat"))
                    else spec
                    for spec in plan.inputs
                )
            }
        )
    pieces = cut_for_plan(parts, plan)
    args, kwargs = _call(batch)
    flat = tuple(
        tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for tensor in pieces.structure.flatten(args, kwargs)
    )
    if dtype is not None and target.is_floating_point():
        target = target.to(dtype)
    names = pieces.structure.names
    batches = split_batch(flat, plan.num_microbatches, plan.inputs[0].shape[0], names)
    targets = torch.tensor_split(target, len(batches))
    with preserved(model):
        whole_loss = _whole_step(whole, pieces.structure.unflatten, batches, targets, loss_fn)
    with preserved(model):
        parts_loss = _split_step(pieces, batches, targets, loss_fn)
    return _compare(whole, parts, pieces.stages, whole_loss, parts_loss)


def seeded(seed: int) -> None:
    """Make what is drawn from here on the same every time: weights, and made-up data."""
    torch.manual_seed(seed)


def _whole_step(
    model: nn.Module, unflatten: Any, batches: Any, targets: Any, loss_fn: LossFunction
) -> float:
    total = 0.0
    for flat, target in zip(batches, targets, strict=True):
        args, kwargs = unflatten([tensor.clone() for tensor in flat])
        loss = loss_fn(model(*args, **kwargs), target) / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total


def _split_step(pieces: CutModel, batches: Any, targets: Any, loss_fn: LossFunction) -> float:
    total = 0.0
    for flat, target in zip(batches, targets, strict=True):
        run = PieceRun(pieces.stages, pieces.boundaries, [tensor.clone() for tensor in flat])
        output = pieces.captured.unflatten_output(run.outputs)
        loss = loss_fn(output, target) / len(batches)
        loss.backward()
        run.hand_back()
        total += float(loss.detach())
    return total


def _compare(
    whole: nn.Module, parts: nn.Module, stages: Any, whole_loss: float, parts_loss: float
) -> Verification:
    held = {name for stage in stages for name in stage.state_dict()}
    wanted = set(whole.state_dict())
    theirs = dict(parts.named_parameters())
    gradients = {}
    for name, parameter in whole.named_parameters():
        ours, split = parameter.grad, theirs[name].grad
        if ours is None and split is None:
            continue
        if ours is None or split is None:
            gradients[name] = 0.0 if _is_zero(ours) and _is_zero(split) else float("inf")
        else:
            gradients[name] = relative_difference(split, ours)
    split_buffers = dict(parts.named_buffers())
    return Verification(
        loss=abs(parts_loss - whole_loss) / max(abs(whole_loss), 1e-30),
        gradients=gradients,
        buffers={
            name: relative_difference(split_buffers[name], buffer)
            for name, buffer in whole.named_buffers()
        },
        missing=tuple(sorted(wanted - held)),
        unknown=tuple(sorted(held - wanted)),
    )


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
