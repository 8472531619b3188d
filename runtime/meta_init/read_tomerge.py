"""Give a model's tensors the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from .tensor_slots import Slot
from .weight_files import Source, open_source

SHOWN = 5
"""Names listed of each kind of mismatch."""


class Reading:
    """Which of a model's tensors a checkpoint has, found out before anything is read.

    Args:
        path: See `Weights`.
        slots: All of the model's.
        strict: See `Weights`.

    Raises:
        InvalidInput: There is no checkpoint, or it does not fit the model.
    """

    def __init__(self, path: str | Path, slots: Sequence[Slot], *, strict: bool) -> None:
        self._source = open_source(path)
        self._names = {slot.name: _name_in(self._source, slot) for slot in slots}
        _check(str(path), self._source, slots, self._names, strict=strict)

    def has(self, slot: Slot) -> bool:
        """Whether the checkpoint has values for it."""
        return self._names[slot.name] is not None

    def fill(self, slots: Iterable[Slot]) -> None:
        """Read the values of some, which have memory at their homes; the others' are not read."""
        wanted: dict[str, Tensor] = {}
        for slot in slots:
            name = self._names[slot.name]
            if name is not None:
                wanted[name] = slot.home.get().detach()
        with torch.no_grad():
            self._source.fill(wanted)


def _name_in(source: Source, slot: Slot) -> str | None:
    """Under which of its names a tensor was saved."""
    return next((name for name in slot.names if name in source.shapes), None)


def _check(
    path: str,
    source: Source,
    slots: Sequence[Slot],
    names: dict[str, str | None],
    *,
    strict: bool,
) -> None:
    wrong = [
        f"{slot.name} is {list(slot.tensor.shape)} in the model, {list(source.shapes[name])} there"
        for slot in slots
        if (name := names[slot.name]) is not None
        and source.shapes[name] != tuple(slot.tensor.shape)
    ]
    missing = [slot.name for slot in slots if slot.is_persistent and names[slot.name] is None]
    known = {name for slot in slots for name in slot.names}
    unused = [name for name in source.shapes if name not in known]
    lines = [f"{_listed(wrong)}"] if wrong else []
    if missing and strict:
        lines.append(f"it lacks {_listed(missing)}")
    if unused and strict:
        lines.append(f"the model has no {_listed(unused)}")
    if lines:
        way_out = "" if wrong else "; pass Weights(strict=False) to initialise what is missing"
        raise InvalidInput(f"{path} does not fit the model: {'; '.join(lines)}{way_out}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
