"""What comes back to the master: outputs of micro-batches, or the error that ended the step."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed.rpc as rpc

from .calls import Failure


class Inbox:
    """Outputs of the current step; stages put them in from threads of their own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = -1
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._failure: Failure | None = None

    def begin(self) -> int:
        """Number of a new step; what comes of earlier ones from now on is dropped."""
        with self._changed:
            self._step += 1
            self._outputs, self._failure = {}, None
            return self._step

    def put(self, step: int, microbatch: int, outputs: tuple[Any, ...]) -> None:
        """A micro-batch is through."""
        with self._changed:
            if step == self._step:
                self._outputs[microbatch] = outputs
                self._changed.notify_all()

    def fail(self, step: int, failure: Failure) -> None:
        """A stage raised; the first to say so is heard."""
        with self._changed:
            if step == self._step:
                self._failure = self._failure or failure
                self._changed.notify_all()

    def has(self, count: int, seconds: float) -> bool:
        """Wait for so many outputs, or a failure, no longer than ``seconds``.

        Raises:
            StagewrightError: A stage raised.
        """
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self._outputs) >= count or self._failure is not None, seconds
            )
            if self._failure is not None:
                raise self._failure.to_error()
            return came

    @property
    def count(self) -> int:
        """How many micro-batches are through."""
        return len(self._outputs)

    def take(self) -> list[tuple[Any, ...]]:
        """All outputs in the order of micro-batches; the inbox keeps none."""
        with self._changed:
            outputs, self._outputs = self._outputs, {}
        return [outputs[microbatch] for microbatch in sorted(outputs)]


def deliver(inbox: rpc.RRef[Inbox], step: int, microbatch: int, outputs: tuple[Any, ...]) -> None:
    """Runs on the master, called by the last stage."""
    inbox.local_value().put(step, microbatch, outputs)


def report(inbox: rpc.RRef[Inbox], step: int, failure: Failure) -> None:
    """Runs on the master, called by the stage that failed."""
    inbox.local_value().fail(step, failure)
