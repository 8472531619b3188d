"""Check of a step for losses and gradients that are infinite or NaN, and for where they arose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...core.plan.schedule import Action, Work

Kind = Literal["received", "computed", "loss"]


@dataclass(frozen=True)
class _Reading:
    kind: Kind
    action: Action
    largest: Tensor
    """Largest magnitude; NaN if any value is."""


class FiniteCheck:
    """Record of the largest magnitudes of what each action of a step received and made.

    A step fails if a loss or a gradient is not finite. Activations are looked at only to find where
    that arose, and only for NaN: masks of minus infinity cross cuts in sound models. On a GPU no
    value is read before the step ends, and then in one go.
    """

    def __init__(self) -> None:
        self._looked: list[_Reading] = []
        self._along: list[tuple[Tensor, Callable[[Sequence[bool]], None]]] = []

    def read_along(self, flags: Tensor, check: Callable[[Sequence[bool]], None]) -> None:
        """Let `find` read flags, too, and call ``check`` with them: the host waits but once."""
        self._along.append((flags, check))

    @property
    def is_empty(self) -> bool:
        """Return True if there is nothing to read, so that `find` does not wait for the device."""
        return not (self._looked or self._along)

    def look(
        self,
        action: Action,
        arrived: Sequence[Tensor],
        losses: Sequence[Tensor],
        made: Sequence[object],
    ) -> None:
        """Record an action; ``losses`` are what it adds to the step's loss."""
        self._record("received", action, arrived)
        self._record("computed", action, made)
        self._record("loss", action, losses)

    def _record(self, kind: Kind, action: Action, values: Sequence[object]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.dtype.is_complex:
                value = torch.view_as_real(value.detach().resolve_conj())
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                # Ten times as fast on a CPU as the maximum norm; NaN if any value is.
                value = value.detach()
                if value.itemsize == 1:  # torch compares no floats of eight bits
                    value = value.float()
                low, high = torch.aminmax(value)
                largest = torch.maximum(high.double(), -low.double())
                self._looked.append(_Reading(kind, action, largest))

    def find(self, inputs: Sequence[Sequence[Tensor]]) -> tuple[str, bool] | None:
        """Return a description of the step's first value that is not finite, if it matters.

        It does if a loss or gradient is among such values. True is returned with it if another
        stage sent it. ``inputs`` are those of each micro-batch, on ranks of the first stage.
        """
        values = self._read()
        if all(map(math.isfinite, values)):
            return None
        found = [
            (each, is_fatal)
            for each, value in zip(self._looked, values, strict=True)
            for is_fatal in [each.kind == "loss" or each.action.work is not Work.FORWARD]
            if math.isnan(value) or (is_fatal and math.isinf(value))
        ]
        if not any(is_fatal for _, is_fatal in found):
            return None
        first, _ = found[0]
        return _describe(first, inputs), first.kind == "received"

    def _read(self) -> list[float]:
        """Return the largest magnitudes, and check what was to be read along with them."""
        flags = [flags.double() for flags, _ in self._along]
        magnitudes = [each.largest.reshape(1) for each in self._looked]
        if self.is_empty:
            return []
        values: list[float] = torch.cat([*magnitudes, *flags]).tolist()
        rest = iter(values[len(magnitudes) :])
        for each, check in self._along:
            check([next(rest) > 0 for _ in range(len(each))])
        return values[: len(magnitudes)]


def _describe(first: _Reading, inputs: Sequence[Sequence[Tensor]]) -> str:
    action = first.action
    stage, number = action.stage, action.microbatch
    if first.kind == "loss":
        return f"the loss of micro-batch {number}, on stage {stage}, is infinite or NaN"
    if action.work is not Work.FORWARD:
        what = f"infinite or NaN gradients for micro-batch {number}"
        if first.kind == "received":
            return f"stage {stage} received {what}"
        return f"the backward on stage {stage} made {what} out of finite ones"
    if first.kind == "received":
        return f"stage {stage} received activations with NaN for micro-batch {number}"
    if stage == 0 and any(bool(value.isnan().any()) for value in inputs[number]):
        return f"the inputs of micro-batch {number} hold NaN"
    return f"the forward of micro-batch {number} on stage {stage} made NaN, its inputs hold none"
