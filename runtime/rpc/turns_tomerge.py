"""Whose turn it is: micro-batches of a stage, one at a time and in order.

RPC handlers run in as many threads as requests came. A stage's batch statistics depend on the
order of micro-batches, and its modules are not made for two threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Abandoned(Exception):
    """The step this turn belongs to is over: it failed, or a later one has begun."""


class Turns:
    """The order of work of one stage.

    Steps are numbered upwards by the master. The first turn of a later step ends all waiting for
    turns of earlier ones, so an abandoned step keeps no thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working = threading.Lock()
        self._step = -1
        self._next = 0
        self._failed = False

    @contextmanager
    def turn(self, step: int, microbatch: int, ready: Callable[[], bool]) -> Iterator[None]:
        """Wait until this micro-batch is next and ready, and keep the others out meanwhile.

        Args:
            step: Which step.
            microbatch: Its place in the step.
            ready: Whether whatever else it needs has come; asked again after `changed`.

        Raises:
            Abandoned: The step ended before its turn came.
        """
        with self._changed:
            self._begin(step)
            self._changed.wait_for(
                lambda: self._is_over(step) or (self._next == microbatch and ready())
            )
            if self._is_over(step):
                raise Abandoned
        with self._working:
            try:
                yield
            except BaseException:
                self._finish(step, failed=True)
                raise
        self._finish(step, failed=False)

    @contextmanager
    def between(self) -> Iterator[None]:
        """Keep micro-batches out, to look at the stage or to change it."""
        with self._working:
            yield

    def changed(self) -> None:
        """Something that a turn may wait for has come."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """No turn will come any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _begin(self, step: int) -> None:
        if step > self._step:
            self._step, self._next, self._failed = step, 0, False
            self._changed.notify_all()

    def _is_over(self, step: int) -> bool:
        return self._failed or step != self._step

    def _finish(self, step: int, *, failed: bool) -> None:
        with self._changed:
            if step == self._step:
                self._next += 1
                self._failed = self._failed or failed
            self._changed.notify_all()
