"""A server's end, in order: not ready, then nothing new, then nothing at all.

::

    serving ──begin──▶ leaving ──delay──▶ refusing ──all answered, or grace──▶ done
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.scopes import SAFE_METHODS
from ..http.problems import Problem

RETRY_AFTER_S = 10
"""When to ask again: another server answers by then, or this one is back."""

Phase = Literal["serving", "leaving", "refusing", "done"]

_log = logging.getLogger(__name__)


class GracefulShutdown:
    """How far a server is on its way out. It belongs to the event loop's thread.

    Args:
        delay_s: How long it only says that it is not ready.
        grace_s: How long requests in flight may go on then.
        now: A clock that never goes back, in seconds.
    """

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
        """Whether a load balancer should look elsewhere."""
        return self.phase != "serving"

    @property
    def is_refusing(self) -> bool:
        """Whether nothing new is begun; streams of events should end."""
        return self.phase in ("refusing", "done")

    @property
    def grace_left_s(self) -> float:
        return max(0.0, self._since + self._grace_s - self._now())

    def on_refusing(self, callback: Callable[[], Awaitable[None] | None]) -> None:
        """Have something done once when nothing new is begun any more: hand unfinished work back.

        What it raises is logged, and keeps nobody alive.
        """
        self._callbacks.append(callback)

    def begin(self) -> None:
        """Say that this server is not ready; later calls change nothing."""
        if self.phase == "serving":
            self.phase, self._since = "leaving", self._now()
            _log.info("draining: not ready from now on")

    async def step(self) -> bool:
        """Go on as far as it is time to; whether the server may end now."""
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
        """Begin nothing new, whatever the delay."""
        if self.is_refusing:
            return
        self.phase, self._since = "refusing", self._now()
        _log.info("draining: nothing new is begun", extra={"in_flight": self.num_in_flight})
        self._handing_back = asyncio.create_task(self._hand_back())

    async def _hand_back(self) -> None:
        for callback in self._callbacks:
            try:
                done = callback()
                if done is not None:
                    await done
            except Exception:  # noqa: BLE001 - the others have work to hand back, too
                _log.exception("could not hand unfinished work back")

    @contextmanager
    def request(self) -> Iterator[Callable[[], None]]:
        """A request is in flight; what is given lets the server end before it has."""
        counted = True

        def release() -> None:
            nonlocal counted
            if counted:
                counted = False
                self.num_in_flight -= 1

        self.num_in_flight += 1
        try:
            yield release
        finally:
            release()


class DrainGate:
    """Counts requests in flight, and refuses new work at the end (503 with ``Retry-After``).

    What only looks, removes or cancels is answered as long as the server listens.

    Args:
        app: The application behind.
        shutdown: How far the server is.
    """

    def __init__(self, app: ASGIApp, shutdown: GracefulShutdown) -> None:
        self._app = app
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._shutdown.is_refusing and _begins_work(scope):
            await refusal().response()(scope, receive, send)
            return
        with self._shutdown.request() as release:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    kind = Headers(raw=message.get("headers", [])).get("content-type", "")
                    if kind.startswith("text/event-stream"):
                        release()  # its reader takes it up again elsewhere
                await send(message)

            await self._app(scope, receive, watched)


def refusal() -> Problem:
    """That this server begins nothing new."""
    return Problem(
        503,
        "service-stopping",
        f"this server is stopping; ask again in {RETRY_AFTER_S} s",
        headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )


def _begins_work(scope: Scope) -> bool:
    return (
        scope["method"] not in SAFE_METHODS
        and scope["method"] != "DELETE"
        and not scope["path"].endswith("/cancel")
    )
