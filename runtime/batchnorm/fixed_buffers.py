"""Buffers of a stage with replicas that have to stay as they are.

Each replica sees its own micro-batches. What a forward leaves behind in a buffer (a moving average,
a codebook, a count) is then of those alone: replicas compute other numbers than the unsplit model,
and than each other. Running statistics of normalisation are the exception: replicas tell each other
theirs (`batch_statistics`).
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
class _Before:
    """A buffer before a forward.

    Attributes:
        version: Of autograd, which counts changes in place.
        value: A copy, for what changes without being counted; `None` to trust the count.
    """

    name: str
    owner: nn.Module
    buffer: Tensor
    version: int
    value: Tensor | None

    @property
    def has_moved(self) -> bool:
        now = self.owner._buffers[self.name.rpartition(".")[2]]
        if self.value is None:
            return now is not self.buffer or now._version != self.version
        return now is None or now.shape != self.value.shape or _differ(now, self.value)


class FixedBuffers:
    """Sees to it that forwards of a stage in training leave its buffers alone.

    Args:
        stage: A stage that several ranks hold.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._places = [
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
        self._is_first = True

    def check_evaluation(self) -> None:
        """See that an evaluation will not move running statistics, on each replica its own way.

        Raises:
            InvalidInput: It would: a normalising module is in training mode.
        """
        for path, norm in self._norms:
            if norm.training:
                raise InvalidInput(
                    f"{path!r} is in training mode, and its stage has replicas: an evaluation "
                    "would move its running statistics on each by other micro-batches; call "
                    "train(False) first, and train() before the next step"
                )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A forward runs inside.

        Raises:
            InvalidInput: It moved a buffer; nothing has been made of its outputs yet.
        """
        before = [
            _Before(
                name, owner, buffer, buffer._version, buffer.clone() if self._is_first else None
            )
            for name, owner, key in self._places
            if (buffer := owner._buffers[key]) is not None
        ]
        yield
        for each in before:
            if each.has_moved:
                raise InvalidInput(
                    f"the forward moves the buffer {each.name!r}, and its stage has replicas, each "
                    "of which would move its own by other micro-batches: their numbers would not "
                    "be the model's; plan without replicas of that stage (max_replicas=1), or hold "
                    "the buffer still in training"
                )
        self._is_first = False


def _differ(one: Tensor, other: Tensor) -> bool:
    same = (one == other) | ((one != one) & (other != other))  # not a number is the same
    return not bool(torch.all(same))
