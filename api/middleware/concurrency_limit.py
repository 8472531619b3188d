"""How many requests are being answered at once; the others wait in the order they came."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.scopes import is_open

AT_ONCE = 16
"""Four times as many as there are threads for the database: some search, some write."""

TURN_S = 0.25
"""Longest a request keeps others waiting: one that searches or measures goes on without a turn."""


class ConcurrencyLimit:
    """Hands requests on in the order they came, a few at a time.

    Under load every step of a request waits anew behind the steps of all others: what takes eight
    of them, such as a new plan, waits eight times as long as what takes one. With turns each
    request waits once, and all equally.

    Args:
        app: The application behind.
        at_once: How many have a turn.
        turn_s: Longest one has it.
    """

    def __init__(self, app: ASGIApp, at_once: int = AT_ONCE, turn_s: float = TURN_S) -> None:
        self._app = app
        self._turn_s = turn_s
        self._free = asyncio.Semaphore(at_once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        await self._free.acquire()
        turn = _Turn(self._free, self._turn_s)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_stream(message):
                turn.end()  # it lasts as long as its reader wants
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            turn.end()


class _Turn:
    """Somebody's turn, until it is ended, or by itself."""

    def __init__(self, free: asyncio.Semaphore, longest_s: float) -> None:
        self._free: asyncio.Semaphore | None = free
        self._overdue = asyncio.get_running_loop().call_later(longest_s, self.end)

    def end(self) -> None:
        if self._free is not None:
            self._free.release()
            self._free = None
            self._overdue.cancel()


def _is_stream(message: Message) -> bool:
    kind = Headers(raw=message.get("headers", [])).get("content-type", "")
    return kind.startswith("text/event-stream")
