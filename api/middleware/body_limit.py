"""How long a request body may be."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.units import format_bytes
from ..auth.scopes import is_open
from ..http.problems import Problem

MAX_DISCARDED_BYTES = 64 * 2**20
"""How much more of a body than is accepted is still read, so that its sender hears the answer."""

MAX_OPEN_BYTES = 8 * 2**10
"""Of a body that anybody may send: a form with a token in it."""

BODY_WITHIN_S = 120.0
"""16 MiB over a line of a megabit a second take about that."""


class BodyLimit:
    """Reads the body up to a limit before the application sees the request.

    The bytes are counted as they arrive, whatever ``Content-Length`` says, so no more than the
    limit is ever held.

    Ordinary clients send the whole body before they look for an answer; closing the connection
    earlier resets it, and they never see why. So what is too long is read on and thrown away, as
    far as `max_discarded_bytes`, unless the client asked first (``Expect: 100-continue``).

    Args:
        app: The application behind.
        max_bytes: The longest body accepted; where everybody is let in, `MAX_OPEN_BYTES`.
        max_discarded_bytes: What is read beyond that before the refusal, at most.
        within_s: Longest a body may take to arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_discarded_bytes: int = MAX_DISCARDED_BYTES,
        within_s: float = BODY_WITHIN_S,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_read_bytes = max_bytes + max_discarded_bytes
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = _announced_bytes(headers)
        max_bytes = self._longest(scope)
        too_long = announced > max_bytes
        asks_first = headers.get("expect", "").lower() == "100-continue"
        if too_long and (asks_first or announced > self._max_read_bytes):
            await _refuse(max_bytes, scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._within_s):
                body = await self._read(receive, max_bytes, too_long=too_long)
        except TimeoutError:
            await self._too_slow().response()(scope, receive, send)
            return
        except ClientDisconnect:
            return
        if body is None:
            await _refuse(max_bytes, scope, receive, send)
        else:
            await self._app(scope, _replay(body, receive), send)

    def _longest(self, scope: Scope) -> int:
        return min(self._max_bytes, MAX_OPEN_BYTES) if is_open(scope["path"]) else self._max_bytes

    async def _read(self, receive: Receive, max_bytes: int, *, too_long: bool) -> bytes | None:
        """The whole body; `None` if it is too long.

        Raises:
            ClientDisconnect: The client has gone.
        """
        body, num_read, more = bytearray(), 0, True
        while more and num_read <= self._max_read_bytes:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            piece = message.get("body", b"")
            num_read += len(piece)
            more = message.get("more_body", False)
            if too_long or num_read > max_bytes:
                too_long = True
                body.clear()
            else:
                body += piece
        return None if too_long else bytes(body)

    def _too_slow(self) -> Problem:
        return Problem(
            408,
            "request-timeout",
            f"the body did not arrive within {self._within_s:g} s; send it in one go",
            headers={"Connection": "close"},
        )


async def _refuse(max_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
    problem = Problem(
        413,
        "body-too-large",
        f"a request body may have at most {format_bytes(max_bytes)} ({max_bytes} bytes)",
        headers={"Connection": "close"},
    )
    await problem.response()(scope, receive, send)


def _announced_bytes(headers: Headers) -> int:
    """What ``Content-Length`` says; 0 if it says nothing that could be so."""
    announced = headers.get("content-length", "")
    return int(announced) if announced.isdecimal() and len(announced) < 20 else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """The whole body as one message, then whatever else arrives."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
