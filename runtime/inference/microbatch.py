"""In-flight micro-batches, and the ordered queues in which they wait for a stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

Values = tuple[Any, ...]


def always() -> bool:
    """Return True: the micro-batch cannot be cancelled."""
    return True


@dataclass(frozen=True)
class InFlightMicrobatch:
    """Micro-batch on its way through the stages.

    Attributes:
        number: Sequence number over all requests, from 0 without gaps.
        values: Flat tensors, in outputs also other values; empty after a failure.
        ready: Event after which the values are computed; `None` if they already are.
        error: Error of an earlier stage. Stages pass it on: a missing number would block the
            queues behind it.
        is_wanted: Returns False once the request is cancelled; stages then skip it.
    """

    number: int
    values: Values = ()
    ready: torch.cuda.Event | None = None
    error: BaseException | None = None
    is_wanted: Callable[[], bool] = always

    def with_error(self, error: BaseException) -> Self:
        """Return the micro-batch with an error instead of values."""
        return replace(self, values=(), ready=None, error=error)


class OrderedQueue:
    """Queue of micro-batches for one replica of a stage, in the order of their numbers.

    They may arrive in any order, since the replicas of the previous stage overtake each other.
    The queue is unbounded; `RequestDispatcher` bounds the micro-batches in flight.

    It takes number ``first`` and every ``step``-th after it, ``step`` being the number of replicas.
    """

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self._next, self._step = first, step
        self._waiting: dict[int, InFlightMicrobatch] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, microbatch: InFlightMicrobatch) -> None:
        with self._changed:
            self._waiting[microbatch.number] = microbatch
            self._changed.notify_all()

    def get(self) -> InFlightMicrobatch | None:
        """Wait for the next micro-batch; return `None` once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next in self._waiting)
            if self._is_closed:
                return None
            microbatch = self._waiting.pop(self._next)
            self._next += self._step
            return microbatch

    def close(self) -> None:
        """Release the waiting thread and drop the remaining micro-batches."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
