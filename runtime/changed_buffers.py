"""Buffers during recomputation: each forward meets them as its first run did, and changes none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..core.errors import InvalidInput
from ..core.units import name_type

Place = tuple[nn.Module, str]
"""The module that holds a buffer, and its name there."""

BufferValues = Mapping[Place, Tensor | None]


@dataclass(frozen=True)
class _Before:
    buffer: Tensor | None
    version: int
    value: Tensor | None
    """A copy; `None` if there is no buffer, or none of the earlier forwards changed it."""

    def has_changed(self, now: Tensor | None, *, by_value: bool) -> bool:
        if now is not self.buffer:
            return True
        if now is None:
            return False
        if now._version != self.version:
            return True
        return by_value and self.value is not None and not torch.equal(now, self.value)

    def value_before(self, place: Place, now: Tensor | None) -> Tensor | None:
        """Return what a forward found in a buffer that it has changed."""
        if self.value is not None or self.buffer is None:
            return self.value
        if now is not self.buffer and self.buffer._version == self.version:
            return self.buffer  # replaced by another tensor, and not written to
        owner, name = place
        raise InvalidInput(
            f"a forward changes the buffer {name!r} of {name_type(owner)}, which the first "
            "forward left alone, so a recomputation cannot start from its old value; plan without "
            "recomputation of that stage (recompute='never', or checkpoint='never' in one process)"
        )


class ChangedBuffers:
    """The buffers that forwards of a stage change, and what each micro-batch found in them.

    A moving average that a forward reads and updates has moved on by the time of the backward: a
    recomputation from its new value would have other activations than those that went forward.

    Running statistics of normalisation layers are left out: forwards in training do not read them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[Place] = []
        self._statistics: list[Place] = []
        for owner in module.modules():
            found = self._statistics if isinstance(owner, _NormBase) else self._places
            # A ScriptModule's buffers have no iterator.
            found += [(owner, name) for name in owner._buffers.keys()]  # noqa: SIM118
        self._known: set[Place] | None = None

    @contextmanager
    def record(self) -> Iterator[BufferValues]:
        """Run a forward inside; the mapping is then filled with what it found in changed buffers.

        Raises:
            InvalidInput: The forward changes a buffer that the first one left alone.
        """
        # Copies of all buffers cost time. Only the first forward makes them, which also finds
        # changes through ``.data``, which are not counted; code that makes some does so each time.
        known, copies = self._known, dict[int, Tensor]()
        before = {
            place: self._look(place, copies, copies_value=known is None or place in known)
            for place in self._places
        }
        found: dict[Place, Tensor | None] = {}
        yield found
        for place, was in before.items():
            owner, name = place
            now = owner._buffers[name]
            is_known = known is not None and place in known
            if is_known or was.has_changed(now, by_value=known is None):
                found[place] = was.value_before(place, now)
        self._known = (known or set()) | found.keys()

    @contextmanager
    def use_copies(self, values: BufferValues) -> Iterator[None]:
        """Run a recorded forward again inside, on copies of what it found in changed buffers.

        Restoring values afterwards would not do: batch normalisation updates running statistics
        without increasing their version counters, so changes go unnoticed; and writing to a tensor
        that autograd has saved makes backward fail. Buffers that no forward changes are used as
        they are.
        """
        held = [(*place, place[0]._buffers[place[1]]) for place in (*values, *self._statistics)]
        copies: dict[Tensor, Tensor] = {}
        try:
            for owner, name, buffer in held:
                source = values.get((owner, name), buffer)
                # By identity: a buffer that two modules share must stay shared.
                if source is not None and source not in copies:
                    copies[source] = source.clone()
                owner._buffers[name] = None if source is None else copies[source]
            yield
        finally:
            for owner, name, buffer in held:
                owner._buffers[name] = buffer

    def _look(self, place: Place, copies: dict[int, Tensor], *, copies_value: bool) -> _Before:
        owner, name = place
        buffer = owner._buffers[name]
        if buffer is None:
            return _Before(None, 0, None)
        value = copies.setdefault(id(buffer), buffer.clone()) if copies_value else None
        return _Before(buffer, buffer._version, value)
