"""The unsplit model over the same micro-batches, and how far a split run is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from conformance_suite.cell import NUM_MICROBATCHES, TOLERANCE, Cell
from conformance_suite.masks import Masks, Replay
from conformance_suite.models import MODELS, ROWS, Model
from stagewright.capture.equivalence.check import relative_difference

STEPS = 2
"""The second begins with the buffers the first left, and with new data."""

BY_NAME = {model.name: model for model in MODELS}


@dataclass
class StepState:
    """State after a step, on one rank or in the unsplit model.

    Attributes:
        loss: Mean over the batch; `None` on a rank that does not hold it.
        gradients: Name and gradient of each parameter; a name occurs once a copy.
        buffers: Name and value of each buffer, likewise.
    """

    loss: float | None
    gradients: list[tuple[str, Tensor | None]] = field(default_factory=list)
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in (*self.gradients, *self.buffers)}


def batch_of(model: Model, step: int) -> tuple[tuple[Any, ...], Tensor]:
    """Return the whole batch of a step, the same on every rank."""
    torch.manual_seed(1000 + step)
    return model.batch(ROWS * NUM_MICROBATCHES)


def state_of(loss: float | None, modules: Sequence[nn.Module]) -> StepState:
    """Return what modules hold after a step; gradients are taken off them."""
    state = StepState(loss)
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            state.gradients.append((name, parameter.grad))
        state.buffers += [
            (name, buffer.detach().clone())
            for name, buffer in module.named_buffers(remove_duplicate=False)
        ]
        for parameter in module.parameters():
            parameter.grad = None
    return state


def unsplit(cell: Cell, masks: Masks) -> list[StepState]:
    """Every step of the unsplit model, with the given dropout masks."""
    if not masks:
        return _without_masks(cell.model, cell.trains)
    with Replay(masks):
        return _steps(BY_NAME[cell.model], cell.trains)


@lru_cache(maxsize=4)
def _without_masks(name: str, trains: bool) -> list[StepState]:
    return _steps(BY_NAME[name], trains)


def _steps(model: Model, trains: bool) -> list[StepState]:
    module = model.fresh()
    states = []
    for step in range(STEPS):
        inputs, target = batch_of(model, step)
        leaves, spec = pytree.tree_flatten((inputs, target))
        total = 0.0
        for index in range(NUM_MICROBATCHES):
            cut = [
                leaf.chunk(NUM_MICROBATCHES)[index] if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
            piece, wanted = pytree.tree_unflatten(cut, spec)
            with torch.set_grad_enabled(trains):
                loss = model.loss(module(*piece), wanted)
                if trains:  # evaluations report the outputs' loss alone
                    loss = loss + _attribute_losses(model, module)
                loss = loss / NUM_MICROBATCHES
            if trains:
                loss.backward()
            total += float(loss.detach())
        states.append(state_of(total, [module]))
    return states


def _attribute_losses(model: Model, module: nn.Module) -> Tensor:
    """Return the weighted sum of what modules left in their attributes."""
    total = torch.zeros((), dtype=torch.float64)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            for pattern, weight in model.aux_losses:
                if fnmatch(f"{path}.{name}", pattern):
                    total = total + weight * value
    return total


@dataclass(frozen=True)
class Judgement:
    """One rank's account of itself.

    Attributes:
        differences: What is beyond tolerance, and by how much.
        names: Parameters and buffers held by this rank.
        wanted: Those of the unsplit model.
        losses: Whether this rank knew the loss.
    """

    differences: list[tuple[float, str]]
    names: set[str]
    wanted: set[str]
    losses: bool


def judge(found: Sequence[StepState], expected: Sequence[StepState]) -> Judgement:
    """Hold one rank's steps against the unsplit model's."""
    differences = []
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        gradients, buffers = dict(theirs.gradients), dict(theirs.buffers)
        off = [("the loss", _of_loss(ours.loss, theirs.loss))]
        off += [
            (f"the gradient of {name}", _of_gradient(gradient, gradients.get(name)))
            for name, gradient in ours.gradients
        ]
        off += [
            (f"buffer {name}", relative_difference(buffer, buffers[name]))
            for name, buffer in ours.buffers
            if name in buffers
        ]
        differences += [(by, f"{what} in step {step}") for what, by in off if not by <= TOLERANCE]
    return Judgement(
        differences,
        {name for state in found for name in state.names},
        expected[0].names,
        all(state.loss is not None for state in found),
    )


def _of_loss(ours: float | None, theirs: float | None) -> float:
    if ours is None or theirs is None:
        return 0.0
    return relative_difference(torch.tensor(ours), torch.tensor(theirs))


def _of_gradient(ours: Tensor | None, theirs: Tensor | None) -> float:
    """None is not zero: weight decay moves a weight whose gradient is zero."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    return relative_difference(ours, theirs)
