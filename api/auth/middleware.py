"""Authentication middleware: every request passes it before any route sees it.

ASGI middleware and not a dependency of routes, so that a forgotten route, or one that the
framework adds by itself, is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import StagewrightError
from ..http.problems import Problem, problem_of_error
from ..telemetry.log_context import add
from .audit import AuditWriter
from .authenticate import Authenticator
from .principal import Principal
from .rate_limit import PERIOD_S, RateLimiter, RateStatus
from .scopes import is_open, needed_scope


class AuthMiddleware:
    """Admits requests of a known principal that is within its quota and has the scope needed.

    Routes get the principal by `principal.CurrentPrincipal`. Changes and refusals go into the
    audit log. The service has no websockets; all are closed.

    Args:
        app: The application behind.
        authenticator: Finds the principal.
        audit: Writes the audit log.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        audit: AuditWriter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._rate_limiter = RateLimiter(now)
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and is_open(scope["path"])):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                principal, headers = await self._admit(scope)
            # Only errors of admission: those of routes have become responses further inside.
            except Problem as problem:
                await problem.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
            add(project_id=principal.project_id, key_id=principal.id)
            send = self._audit.watch(scope, principal, _with_headers(send, headers))
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _admit(self, scope: Scope) -> tuple[Principal, dict[str, str]]:
        """Return the principal and the response headers about its quota.

        Raises:
            Problem: The request is refused.
        """
        principal, headers = None, dict[str, str]()
        try:
            principal = await self._authenticator.principal(Headers(scope=scope), scope)
            # The quota before the scope: refused requests count, too.
            quota = principal.quotas.max_requests_per_minute
            if quota is not None and principal.id is not None:
                rate = self._rate_limiter.take(principal.id, quota)
                headers = rate_headers(rate)
                if rate.is_exceeded:
                    raise too_many_requests(rate)
            method, path = scope["method"], scope["path"]
            principal.require(needed_scope(method, path), f"{method} {path[:80]}")
        except StagewrightError as error:
            problem = problem_of_error(error)
            if problem.document.status in (401, 403):
                await self._audit.write_denied(scope, principal, problem.kind)
            raise problem from None
        return principal, headers


def rate_headers(rate: RateStatus) -> dict[str, str]:
    """Return the RateLimit fields of the IETF's draft (httpapi-ratelimit-headers-10)."""
    return {
        "RateLimit-Policy": f'"minute";q={rate.quota};w={PERIOD_S:.0f}',
        "RateLimit": f'"minute";r={rate.remaining};t={rate.wait_s}',
    }


def too_many_requests(rate: RateStatus) -> Problem:
    """Return the refusal of a request beyond the quota."""
    return Problem(
        429,
        "too-many-requests",
        f"This key is limited to {rate.quota} requests a minute. Retry in {rate.wait_s} s.",
        headers={"Retry-After": str(rate.wait_s), **rate_headers(rate)},
    )


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    if not headers:
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return send_with_headers
