"""Check that forwards leave the buffers of a replicated stage unchanged.

Each replica sees only its own micro-batches. A buffer that a forward updates (a moving average, a
codebook, a counter) would diverge between replicas, and from the unsplit model. The exception are
running statistics of normalisation layers, which replicas share (`running_statistics`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ...core.errors import InvalidInput


@dataclass(frozen=True)
class _Snapshot:
    """A buffer before a forward.

    Attributes:
        version: Autograd's counter of in-place changes.
        value: A copy, to find changes through ``.data``, which are not counted; `None` to rely on
            the counter.
    """

    name: str
    owner: nn.Module
    buffer: Tensor
    version: int
    value: Tensor | None

    @property
    def has_changed(self) -> bool:
        now = self.owner._buffers[self.name.rpartition(".")[2]]
        if self.value is None:
            return now is not self.buffer or now._version != self.version
        return now is None or now.shape != self.value.shape or _differ(now, self.value)


class FixedBuffers:
    """Check that forwards in training leave the buffers of a stage with replicas unchanged."""

    def __init__(self, stage: nn.Module) -> None:
        self._buffers = [
            (f"{path}.{name}" if path else name, owner, name)
            for path, owner in stage.named_modules()
            if not isinstance(owner, _NormBase)
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._norms = [
            (path, owner)
            for path, owner in stage.named_modules()
            if isinstance(owner, _NormBase) and owner.running_mean is not None
        ]
        self._compared: set[str] = set()

    def check_evaluation(self) -> None:
        """Check that an evaluation will not move running statistics differently on each replica."""
        for path, norm in self._norms:
            if norm.training:
                raise InvalidInput(
                    f"{path!r} is in training mode and its stage has replicas, so an evaluation "
                    "would move its running statistics differently on each; call train(False) "
                    "first, and train() before the next step"
                )

    @contextmanager
    def checked(self, what: str = "forward") -> Iterator[None]:
        """Check that the block changes no buffer, before anything uses its outputs.

        ``what`` it computes is the stage's forward, or the loss alone.
        """
        # Values are compared the first time only: copies of all buffers cost time, and a module
        # that changes a buffer without being counted does so every time.
        compares = what not in self._compared
        before = [
            _Snapshot(name, owner, buffer, buffer._version, buffer.clone() if compares else None)
            for name, owner, key in self._buffers
            if (buffer := owner._buffers[key]) is not None
        ]
        yield
        for each in before:
            if each.has_changed:
                raise InvalidInput(
                    f"the {what} changes the buffer {each.name!r}, and its stage has replicas, "
                    "each of which would change its own copy by different micro-batches, so that "
                    "results would differ from the model's; plan without replicas of that stage "
                    "(max_replicas=1), or leave the buffer unchanged in training"
                )
        self._compared.add(what)


def _differ(one: Tensor, other: Tensor) -> bool:
    same = (one == other) | ((one != one) & (other != other))  # NaN counts as equal to NaN
    return not bool(torch.all(same))
