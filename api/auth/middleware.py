"""What every request passes before any route sees it.

This is ASGI middleware and not a dependency of routes: a route that is forgotten, or that a
framework adds by itself, is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import StagewrightError
from ..http.problems import Problem, from_error
from ..telemetry.log_context import add
from .audit import Trail
from .authenticate import Identification
from .principal import Caller
from .rate_limit import Rate, Rates
from .scopes import is_open, needed_scope


class Gate:
    """Lets a request through whose sender is known, within their quota, and has its scope.

    Routes find who it is by `caller.caller_of`. What changes something, and what is refused, goes
    into the audit log. There are no websockets here; all are closed.

    Args:
        app: The application behind.
        identification: Who is who.
        trail: Writes the audit log.
        now: A clock that never goes back, in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        identification: Identification,
        trail: Trail,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._identification = identification
        self._rates = Rates(now)
        self._trail = trail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, receive, send)
            except Problem as problem:
                await problem.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on.

        Raises:
            Problem: It is refused. Whatever the application raises itself it answers itself.
        """
        caller, rate = await self._admit(scope)
        scope.setdefault("state", {})["caller"] = caller
        add(project_id=caller.project_id, key_id=caller.id)
        told = send if rate is None else _with_headers(send, rate.headers())
        await self._app(scope, receive, self._trail.watching(scope, caller, told))

    async def _admit(self, scope: Scope) -> tuple[Caller, Rate | None]:
        """Who sent it, and what is left of their quota."""
        caller = None
        try:
            caller = await self._identification.caller(Headers(scope=scope), scope)
            rate = self._count(caller)
            method, path = scope["method"], scope["path"]
            caller.require(needed_scope(method, path), f"{method} {path[:80]}")
            return caller, rate
        except Problem as problem:
            if problem.document.status in (401, 403):
                await self._trail.denied(scope, caller, problem.kind)
            raise
        except StagewrightError as error:
            raise from_error(error) from None

    def _count(self, caller: Caller) -> Rate | None:
        quota = caller.quotas.max_requests_per_minute
        if quota is None or caller.id is None:
            return None
        rate = self._rates.take(caller.id, quota)
        if rate.is_exceeded:
            raise rate.problem()
        return rate


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    async def send_with(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return send_with


def _is_open(scope: Scope) -> bool:
    return scope["type"] == "http" and is_open(scope["path"])
