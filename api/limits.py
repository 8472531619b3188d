"""How long a request body may be."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.units import format_bytes
from .problems import Problem


class BodyLimit:
    """Reads the body up to a limit before the application sees the request.

    The bytes are counted as they arrive, whatever ``Content-Length`` says, so no more than the
    limit is ever held.

    Args:
        app: The application behind.
        max_bytes: The longest body accepted.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        await self._app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = Problem(
            413,
            "body-too-large",
            f"a request body may have at most {format_bytes(self._max_bytes)} "
            f"({self._max_bytes} bytes)",
            headers={"Connection": "close"},
        )
        await problem.response()(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The whole body as one message, then whatever else arrives."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
