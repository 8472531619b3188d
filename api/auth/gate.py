"""What every request passes before any route sees it.

This is ASGI middleware and not a dependency of routes: a route that is forgotten, or that a
framework adds by itself, is closed.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import StagewrightError
from ..problems import Problem, from_error
from .identify import Identification
from .scopes import OPEN_PATHS, needed_scope


class Gate:
    """Lets a request through whose sender is known and has the scope it needs.

    Routes find who it is by `caller.caller_of`. There are no websockets here; all are closed.

    Args:
        app: The application behind.
        identification: Who is who.
    """

    def __init__(self, app: ASGIApp, identification: Identification) -> None:
        self._app = app
        self._identification = identification

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._admit(scope)
            except Problem as problem:
                await problem.response()(scope, receive, send)
            except StagewrightError as error:
                await from_error(error).response()(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _admit(self, scope: Scope) -> None:
        caller = await self._identification.caller(Headers(scope=scope))
        method, path = scope["method"], scope["path"]
        caller.require(needed_scope(method, path), f"{method} {path[:80]}")
        scope.setdefault("state", {})["caller"] = caller


def _is_open(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["path"] in OPEN_PATHS
