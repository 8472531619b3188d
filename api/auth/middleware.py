"""Authentication middleware, which every request passes first, and the audit log that it writes.

ASGI middleware and not a dependency of routes, so that a forgotten route, or one that the
framework adds by itself, is closed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import StagewrightError
from ..http.problems import Problem, problem_of_error
from ..store.records import AuditEvent
from ..store.store import Store
from ..telemetry.tracing import add, request_id
from .access import API, COMPUTED, SAFE_METHODS, Principal, is_open, needed_scope
from .authenticate import Authenticator
from .rate_limit import PERIOD_S, RateLimiter, RateStatus


class AuthMiddleware:
    """Middleware that admits known principals with the needed scope and within their quota.

    Routes get the principal by `access.CurrentPrincipal`. Changes and refusals go into the
    audit log. The service has no websockets; all are closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        audit: AuditWriter,
        now: Callable[[], float] = time.monotonic,
        *,
        key_requests: int | None = None,
        project_requests: int | None = None,
    ) -> None:
        self._key_requests, self._project_requests = key_requests, project_requests
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
        """Return the principal and the response headers about its quota; raise the refusal."""
        principal, headers = None, dict[str, str]()
        try:
            principal = await self._authenticator.principal(Headers(scope=scope), scope)
            # The quotas before the scope: refused requests count, too.
            headers = self._count(principal)
            method, path = scope["method"], scope["path"]
            principal.require(needed_scope(method, path), f"{method} {path[:80]}")
        except StagewrightError as error:
            problem = problem_of_error(error)
            if problem.document.status in (401, 403):
                await self._audit.write_denied(scope, principal, problem.kind)
            raise problem from None
        return principal, headers

    def _count(self, principal: Principal) -> dict[str, str]:
        """Count a request of a key and of its project; return headers about the key's quota.

        Raises: Problem, 429. The server's own token has no quota.
        """
        if principal.id is None:
            return {}
        headers = dict[str, str]()
        quota = principal.quotas.max_requests_per_minute or self._key_requests
        if quota is not None:
            rate = self._rate_limiter.take(principal.id, quota)
            if rate.is_exceeded:
                raise too_many_requests(rate)
            headers = rate_headers(rate)
        # Only what the key admits: one key's refused requests must not use its project's up.
        if self._project_requests is not None:
            rate = self._rate_limiter.take(principal.project_id, self._project_requests)
            if rate.is_exceeded:
                raise too_many_requests(rate, "project")
        return headers


def rate_headers(rate: RateStatus) -> dict[str, str]:
    """Return the RateLimit fields of the IETF's draft (httpapi-ratelimit-headers-10)."""
    return {
        "RateLimit-Policy": f'"minute";q={rate.quota};w={PERIOD_S:.0f}',
        "RateLimit": f'"minute";r={rate.remaining};t={rate.wait_s}',
    }


def too_many_requests(rate: RateStatus, owner: str = "key") -> Problem:
    """Return the refusal of a request beyond the quota."""
    return Problem(
        429,
        "too-many-requests",
        f"This {owner} is limited to {rate.quota} requests a minute. Retry in {rate.wait_s} s.",
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


DENIALS_PER_MINUTE = 60
"""Refusals written down. Anyone can provoke them without end, and the log is kept."""

MAX_CHARACTERS = 200
VERBS = {"POST": "create", "PUT": "replace", "PATCH": "change", "DELETE": "delete"}

_log = logging.getLogger(__name__)


class AuditWriter:
    """Writer of admitted changes and refusals to the audit log.

    An entry that cannot be stored goes to the server's log, since the change has happened.
    """

    def __init__(self, store: Store, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._denial_rate = RateLimiter(now)
        self._num_unwritten = 0

    def watch(self, scope: Scope, principal: Principal, send: Send) -> Send:
        """Return a ``send`` that writes the entry first, so that no answer goes out unlogged."""
        if scope["method"] in SAFE_METHODS:
            return send

        async def write_then_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 403:  # the route found that the body needs a further scope
                    await self.write_denied(scope, principal, "forbidden")
                elif message["status"] < 300 and scope["path"] not in COMPUTED:
                    location = Headers(raw=message.get("headers", [])).get("location", "")
                    await self._write(_event(scope, "ok", principal, location))
            await send(message)

        return write_then_send

    async def write_sign_in(self, scope: Scope, principal: Principal) -> None:
        """Write that a session was opened with a valid token."""
        await self._write(_event(scope, "ok", principal))

    async def write_denied(self, scope: Scope, principal: Principal | None, kind: str) -> None:
        """Write that a request was refused, at most `DENIALS_PER_MINUTE` times a minute."""
        if self._denial_rate.take("", DENIALS_PER_MINUTE).is_exceeded:
            self._num_unwritten += 1
            return
        details = {"unwritten_before": self._num_unwritten} if self._num_unwritten else {}
        self._num_unwritten = 0
        event = _event(scope, kind, principal)
        await self._write(event.model_copy(update={"details": details}))

    async def _write(self, event: AuditEvent) -> None:
        try:
            await run_in_threadpool(self._store.audit.add, event)
        except StagewrightError as error:
            _log.error("not in the audit log: %s (%s)", event.model_dump_json(), error)


def _event(
    scope: Scope, outcome: str, principal: Principal | None, location: str = ""
) -> AuditEvent:
    client = scope.get("client")
    action, object_id = audit_name(scope["method"], scope["path"])
    return AuditEvent(
        action=action,
        outcome=outcome,
        project_id=None if principal is None else principal.project_id,
        key_id=None if principal is None else principal.id,
        object_id=object_id or location.rpartition("/")[2] or None,
        request_id=request_id(),
        address=client[0] if client else None,
    )


def audit_name(method: str, path: str) -> tuple[str, str | None]:
    """Return the action a request stands for, and the id of its object.

    ``POST /v1/plans`` is ``plans.create``, ``DELETE /v1/api-keys/key_1`` is ``api-keys.delete``
    of ``key_1``, ``POST /v1/jobs/job_1/cancel`` is ``jobs.cancel`` of ``job_1``. Any other
    request is named by its method and path.
    """
    parts = path.removeprefix(API).split("/") if path.startswith(API) else []
    # Paths are the client's text: only plain words become names, or the log could be forged.
    if 1 <= len(parts) <= 3 and all(re.fullmatch(r"[\w.-]{1,80}", part) for part in parts):
        verb = parts[2] if len(parts) == 3 else VERBS.get(method, "read")
        return f"{parts[0]}.{verb}", parts[1] if len(parts) > 1 else None
    return f"{method} {path}"[:MAX_CHARACTERS], None
