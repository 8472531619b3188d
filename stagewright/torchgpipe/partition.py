"""One partition as a stage of the runtime: flat tensors in and out, skips passed along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .microbatch import check
from .skip.routes import SkipName
from .skip.tracker import SkipTracker, use_skip_tracker


class Form:
    """Whether what lies between two partitions is one tensor or a tuple, by micro-batch.

    The runtime passes tuples; a layer is called with what the layer before it returned.
    """

    def __init__(self, atomic: bool | None = None) -> None:
        self._given = atomic
        self._found: dict[int, bool] = {}

    def is_atomic(self, microbatch: int) -> bool:
        """Whether it is one tensor."""
        return self._found[microbatch] if self._given is None else self._given

    def found(self, microbatch: int, value: Any) -> tuple[Any, ...]:
        """Remember the form of a value, and return it as a tuple."""
        self._found[microbatch] = not isinstance(value, tuple)
        return value if isinstance(value, tuple) else (value,)


class PartitionRun:
    """Calls a partition for the micro-batches of one batch.

    Args:
        partition: The partition.
        name: For errors.
        given: The form of what it is given.
        returned: Takes the form of what it returns.
        takes: Skip tensors stashed in earlier partitions, in the order they are passed.
        leaves: Skip tensors stashed here for later partitions.
    """

    def __init__(
        self,
        partition: nn.Sequential,
        name: str,
        given: Form,
        returned: Form,
        takes: Sequence[SkipName],
        leaves: Sequence[SkipName],
    ) -> None:
        self._partition = partition
        self._name = name
        self._given = given
        self._returned = returned
        self._takes = takes
        self._leaves = leaves

    def __call__(self, microbatch: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run it.

        Raises:
            TypeError: It returned what is neither a tensor nor a tuple of tensors.
        """
        main = len(values) - len(self._takes)
        tracker = SkipTracker(dict(zip(self._takes, values[main:], strict=True)))
        inputs = values[:main]
        with use_skip_tracker(tracker):
            output = self._partition(inputs[0] if self._given.is_atomic(microbatch) else inputs)
        check(output, f"the output of {self._name}")
        left = tuple(tracker.tensors.pop(name) for name in self._leaves)
        return self._returned.found(microbatch, output) + left
