"""Auxiliary losses that modules leave in their attributes, such as mixture-of-experts balance.

They are no outputs: each is read where it arises, right after its stage's forward, weighted, and
differentiated on that stage. No message carries them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.program.program import find_module, is_inside
from ...capture.program.segment import Segment, get_whole_model, has_checkpoints
from ...core.errors import InvalidInput, PlanMismatch
from ...core.units import list_some, name_type
from ..partition.cut import CutModel

AuxLosses = Sequence[str] | Mapping[str, float]
"""Patterns of attributes' full names, such as ``*.aux``, with weights if not 1. The first pattern
that matches counts; weight 0 declares that a tensor is no loss."""


@dataclass(frozen=True)
class AuxLoss:
    """An attribute that holds a loss after its module's forward, and the loss's weight."""

    path: str
    name: str
    weight: float


def find_aux_losses(pieces: CutModel, declared: AuxLosses | None) -> list[tuple[AuxLoss, ...]]:
    """Return each stage's auxiliary losses.

    Raises:
        InvalidInput: A pattern matches nothing, a loss is not declared, or a loss is set by code
            that a pipeline takes apart or runs on several stages.
        PlanMismatch: The plan was made before the model kept these losses.
    """
    weights = _weights(declared)
    program, found = pieces.captured.program, [list[AuxLoss]() for _ in pieces.stages]
    matched: dict[str, str | None] = {
        full: next((pattern for pattern in weights if fnmatchcase(full, pattern)), None)
        for full in program.losses
    }
    unused = [pattern for pattern in weights if pattern not in matched.values()]
    if unused:
        raise InvalidInput(
            f"aux_losses={unused[0]!r} matches no attribute that forward sets to a number with a "
            f"gradient; it sets {list_some(program.losses, 3) or 'none'}"
        )
    unknown = [full for full, pattern in matched.items() if pattern is None]
    if unknown:
        raise InvalidInput(
            f"forward leaves a number with a gradient in {list_some(unknown, 3)}, as auxiliary "
            "losses are left, which no pipeline differentiates unless told to: pass "
            f"aux_losses={_patterns_of(unknown)!r}, or a mapping from such patterns to weights; "
            "weight 0 if it is no loss"
        )
    for full, pattern in matched.items():
        path, _, name = full.rpartition(".")
        weight = weights[pattern or ""]
        if weight:
            stage = _find_stage(pieces, path, name)
            if has_checkpoints(pieces.stages[stage]):
                raise PlanMismatch(
                    f"stage {stage} recomputes its layers one by one, and {full!r} is left by the "
                    "first run of one, which has no graph; plan with recompute='auto' or 'never'"
                )
            found[stage].append(AuxLoss(path, name, weight))
    return [tuple(losses) for losses in found]


def _patterns_of(names: Sequence[str]) -> list[str]:
    """Return a pattern for each attribute, whatever modules have it: ``*.aux``."""
    ends = (name.rpartition(".") for name in names)
    return list(dict.fromkeys(f"*.{end}" if path else end for path, _, end in ends))


def _weights(declared: AuxLosses | None) -> dict[str, float]:
    if isinstance(declared, str):
        raise InvalidInput(f"aux_losses is {declared!r}; pass a list: [{declared!r}]")
    given = declared if isinstance(declared, Mapping) else dict.fromkeys(declared or (), 1.0)
    for pattern, weight in given.items():
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise InvalidInput(f"aux_losses[{pattern!r}] is {weight!r}; pass a finite weight")
    return dict(given)


def _find_stage(pieces: CutModel, path: str, name: str) -> int:
    """Return the only stage that calls a loss's module."""
    program = pieces.captured.program
    module = program.model.get_submodule(path)
    if not any(is_inside(path, opaque) for opaque in program.opaque):
        if not path:
            raise InvalidInput(
                f"the auxiliary loss {name!r} is set by the model's own forward, which a pipeline "
                "takes apart; set it in the submodule that computes it, or return it"
            )
        raise PlanMismatch(
            f"the plan takes {path!r} apart, and would lose its auxiliary loss {name!r}; profile "
            "and plan this model again"
        )
    holders = [index for index, stage in enumerate(pieces.stages) if _module(stage, path) is module]
    if len(holders) != 1:
        where = ", ".join(map(str, holders)) or "none"
        raise InvalidInput(
            f"{path!r} sets the auxiliary loss {name!r} and is called on several stages ({where}), "
            "but its attribute holds the last call's only; keep all calls in one stage, or return "
            "the loss"
        )
    return holders[0]


def _module(stage: nn.Module, path: str) -> nn.Module | None:
    if isinstance(stage, Segment) and not path:
        return get_whole_model(stage)
    return find_module(stage, path)


class AuxLossReader:
    """Reader of the auxiliary losses of a stage."""

    def __init__(self, stage: nn.Module, losses: Sequence[AuxLoss]) -> None:
        self._sources: list[tuple[nn.Module, AuxLoss]] = []
        for loss in losses:
            module = _module(stage, loss.path)
            assert module is not None
            self._sources.append((module, loss))

    def run(self, forward: Callable[[], Any]) -> tuple[Any, Tensor | None]:
        """Run a forward; return its value and the weighted sum of its losses, `None` without any.

        The attributes keep values without a graph, which would otherwise outlive its backward.

        Raises:
            InvalidInput: The forward left no single number in one of the attributes.
        """
        # Compared by identity: a module that sets no loss this time would give that of the last. A
        # loss changed in place is refused as well: one tensor cannot hold all micro-batches'.
        before = [getattr(module, loss.name, None) for module, loss in self._sources]
        value = forward()
        total: Tensor | None = None
        for (module, loss), old in zip(self._sources, before, strict=True):
            found = getattr(module, loss.name, None)
            if found is old or not isinstance(found, Tensor) or found.numel() != 1:
                raise InvalidInput(_explain_missing(loss, found, is_old=found is old))
            # `total` has the graph, and loses it in its backward. The attribute would keep it until
            # the next forward, with the activations of this one.
            setattr(module, loss.name, found.detach())
            # Summed in at least single precision, as losses of bfloat16 modules would be by a loop.
            wide = torch.promote_types(found.dtype, torch.float32)
            share = found.reshape(()).to(wide) * loss.weight
            total = share if total is None else total + share
        return value, total


def _explain_missing(loss: AuxLoss, found: Any, *, is_old: bool) -> str:
    if is_old:
        what = "was not set in this forward, or only changed in place"
    elif isinstance(found, Tensor):
        what = f"has shape {tuple(found.shape)}"
    else:
        what = f"is {name_type(found)}"
    return (
        f"the auxiliary loss {loss.path + '.' + loss.name!r} {what}; it must be set to one number "
        "in every training forward, or declared with weight 0"
    )
