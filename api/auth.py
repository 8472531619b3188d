"""Who may ask: everything needs the bearer token, except a short list of open paths.

This is ASGI middleware and not a dependency of routes: a route that is forgotten, or that a
framework adds by itself, is closed.
"""

from __future__ import annotations

from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .problems import Problem

OPEN_PATHS = frozenset({"/healthz"})


class BearerAuth:
    """Lets a request through that carries the token, compared in constant time.

    Args:
        app: The application behind.
        token: The token; ASCII.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or self._carries_token(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        problem = Problem(
            401,
            "unauthorized",
            "send the server's token: 'Authorization: Bearer <token>'",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await problem.response()(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["path"] in OPEN_PATHS

    def _carries_token(self, scope: Scope) -> bool:
        sent = Headers(scope=scope).getlist("authorization")
        if len(sent) != 1:
            return False
        scheme, _, token = sent[0].partition(" ")
        return scheme.lower() == "bearer" and compare_digest(
            token.strip().encode("latin-1"), self._token
        )
