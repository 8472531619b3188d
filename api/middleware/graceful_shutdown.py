"""Graceful shutdown: first not ready, then no new work, then the end.

::

    serving ──begin──▶ leaving ──delay──▶ refusing ──all answered, or grace over──▶ done

`RequestChecks` refuses new work, `AccessLog` counts the requests in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["serving", "leaving", "refusing", "done"]

_log = logging.getLogger(__name__)


class GracefulShutdown:
    """State of a server's shutdown; used on the event loop's thread only."""

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        grace_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._delay_s = delay_s
        self._grace_s = grace_s
        self._now = now
        self._since = 0.0
        self._callbacks: list[Callable[[], Awaitable[None] | None]] = []
        self._handing_back: asyncio.Task[None] | None = None
        self.phase: Phase = "serving"
        self.num_in_flight = 0

    @property
    def is_draining(self) -> bool:
        """True once load balancers should use another server."""
        return self.phase != "serving"

    @property
    def is_refusing(self) -> bool:
        """True once no new work is begun, and streams of events should end."""
        return self.phase in ("refusing", "done")

    @property
    def grace_left_s(self) -> float:
        return max(0.0, self._since + self._grace_s - self._now())

    def on_refusing(self, callback: Callable[[], Awaitable[None] | None]) -> None:
        """Register a callback for when new work is refused, e.g. to hand unfinished work back.

        Its errors are logged and do not stop the shutdown.
        """
        self._callbacks.append(callback)

    def begin(self) -> None:
        """Report from now on that this server is not ready; later calls change nothing."""
        if self.phase == "serving":
            self.phase, self._since = "leaving", self._now()
            _log.info("draining: not ready from now on")

    async def step(self) -> bool:
        """Advance to the next phase if it is due; return True once the server may end."""
        if self.phase == "leaving" and self._now() >= self._since + self._delay_s:
            self.refuse()
        if self.phase == "refusing" and (self._is_idle or not self.grace_left_s):
            self.phase = "done"
        return self.phase == "done"

    @property
    def _is_idle(self) -> bool:
        handed_back = self._handing_back is None or self._handing_back.done()
        return handed_back and not self.num_in_flight

    def refuse(self) -> None:
        """Refuse new work from now on, whatever the delay."""
        if self.is_refusing:
            return
        self.phase, self._since = "refusing", self._now()
        _log.info("draining: nothing new is begun", extra={"in_flight": self.num_in_flight})
        # The reference keeps the task alive: the event loop itself holds only a weak one.
        self._handing_back = asyncio.create_task(self._hand_back())

    async def _hand_back(self) -> None:
        for callback in self._callbacks:
            try:
                done = callback()
                if done is not None:
                    await done
            except Exception:  # noqa: BLE001 - the other callbacks have work to hand back, too
                _log.exception("could not hand unfinished work back")

    @contextmanager
    def request(self) -> Iterator[Callable[[], None]]:
        """Count a request in flight; the function given stops counting it before its end."""
        is_counted = True

        def release() -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self.num_in_flight -= 1

        self.num_in_flight += 1
        try:
            yield release
        finally:
            release()
