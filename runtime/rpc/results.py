"""Results of a step on the master: outputs of micro-batches, or the error that ended it."""

from __future__ import annotations

import threading
from typing import Any

from ...core.errors import StagewrightError


class OutputCollector:
    """Collector of the outputs of the current step; stages deliver them on RPC threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = -1
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._failure: StagewrightError | None = None

    def begin(self) -> int:
        """Start a new step and return its number; late outputs of earlier steps are dropped."""
        with self._changed:
            self._step += 1
            self._outputs, self._failure = {}, None
            return self._step

    def put(self, step: int, microbatch: int, outputs: tuple[Any, ...]) -> None:
        """Store the outputs of a micro-batch."""
        with self._changed:
            # Outputs of another step are late: it was given up after an error.
            if step == self._step:
                self._outputs[microbatch] = outputs
                self._changed.notify_all()

    def fail(self, step: int, failure: StagewrightError) -> None:
        """Record the failure of a stage; the first one counts."""
        with self._changed:
            if step == self._step:
                self._failure = self._failure or failure
                self._changed.notify_all()

    def has(self, count: int, seconds: float) -> bool:
        """Return True once ``count`` outputs have come, within ``seconds``; raise a failure."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self._outputs) >= count or self._failure is not None, seconds
            )
            if self._failure is not None:
                raise self._failure
            return came

    @property
    def count(self) -> int:
        """Number of micro-batches whose outputs have come."""
        return len(self._outputs)

    def take(self) -> list[tuple[Any, ...]]:
        """Remove and return all outputs, in the order of micro-batches."""
        with self._changed:
            outputs, self._outputs = self._outputs, {}
        return [outputs[microbatch] for microbatch in sorted(outputs)]
