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
from .audit import AuditWriter
from .authenticate import Authenticator
from .principal import Principal
from .rate_limit import RateLimiter, RateStatus
from .scopes import is_open, needed_scope


class AuthMiddleware:
    """Lets a request through whose sender is known, within their quota, and has its scope.

    Routes find who it is by `principal.principal_of`. What changes something, and what is refused,
    goes into the audit log. There are no websockets here; all are closed.

    Args:
        app: The application behind.
        authenticator: Who is who.
        audit: Writes the audit log.
        now: A clock that never goes back, in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        audit: AuditWriter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._identification = authenticator
        self._rates = RateLimiter(now)
        self._audit = audit

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
        principal, rate = await self._admit(scope)
        scope.setdefault("state", {})["principal"] = principal
        add(project_id=principal.project_id, key_id=principal.id)
        told = send if rate is None else _with_headers(send, rate.headers())
        await self._app(scope, receive, self._audit.watching(scope, principal, told))

    async def _admit(self, scope: Scope) -> tuple[Principal, RateStatus | None]:
        """Who sent it, and what is left of their quota."""
        principal = None
        try:
            principal = await self._identification.principal(Headers(scope=scope), scope)
            rate = self._count(principal)
            method, path = scope["method"], scope["path"]
            principal.require(needed_scope(method, path), f"{method} {path[:80]}")
            return principal, rate
        except Problem as problem:
            if problem.document.status in (401, 403):
                await self._audit.denied(scope, principal, problem.kind)
            raise
        except StagewrightError as error:
            raise from_error(error) from None

    def _count(self, principal: Principal) -> RateStatus | None:
        quota = principal.quotas.max_requests_per_minute
        if quota is None or principal.id is None:
            return None
        rate = self._rates.take(principal.id, quota)
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
