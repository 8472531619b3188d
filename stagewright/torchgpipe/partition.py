"""Adapter from a partition to a stage of the runtime, with flat tensors and skip tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .microbatch import check
from .skip.namespace import SkipName
from .skip.tracker import SkipTracker, use_skip_tracker


class Form:
    """Form of the values between two partitions, a tensor or a tuple, by micro-batch.

    The runtime passes tuples, but a layer expects the form that the previous layer returned.
    """

    def __init__(self, atomic: bool | None = None) -> None:
        self._given = atomic
        self._found: dict[int, bool] = {}

    def is_atomic(self, microbatch: int) -> bool:
        """Return True for a single tensor."""
        return self._found[microbatch] if self._given is None else self._given

    def found(self, microbatch: int, value: Any) -> tuple[Any, ...]:
        """Record the form of a value and return it as a tuple."""
        self._found[microbatch] = not isinstance(value, tuple)
        return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class PartitionRun:
    """Runner of a partition on the micro-batches of one batch; its name is for messages.

    It takes skip tensors stashed in earlier partitions, in the order they are passed, and leaves
    those stashed here for later ones.
    """

    partition: nn.Sequential
    name: str
    given: Form
    returned: Form
    takes: Sequence[SkipName]
    leaves: Sequence[SkipName]

    def __call__(self, microbatch: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run a micro-batch; raise `TypeError` unless it returns tensors."""
        # Skip tensors follow a partition's own values, here and in the result (see `LocalStage`).
        main = len(values) - len(self.takes)
        # A new tracker for every run: a recomputation pops the same tensors again.
        tracker = SkipTracker(dict(zip(self.takes, values[main:], strict=True)))
        inputs = values[:main]
        with use_skip_tracker(tracker):
            output = self.partition(inputs[0] if self.given.is_atomic(microbatch) else inputs)
        check(output, f"the output of {self.name}")
        left = tuple(tracker.tensors.pop(name) for name in self.leaves)
        return self.returned.found(microbatch, output) + left
