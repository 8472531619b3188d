"""What the audit log is told: what was made, changed or removed, and what was refused to whom."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from ...core.errors import StagewrightError
from ..store.records import AuditEvent
from ..store.store import Store
from ..telemetry.log_context import request_id
from .principal import Principal
from .rate_limit import RateLimiter
from .scopes import API, COMPUTED, SAFE_METHODS

DENIALS_PER_MINUTE = 60
"""Written down. Anybody can be refused as often as they like, and a line takes room for good."""

MAX_CHARACTERS = 200
VERBS = {"POST": "create", "PUT": "replace", "PATCH": "change", "DELETE": "delete"}

_log = logging.getLogger(__name__)


class AuditWriter:
    """Writes to the audit log what passes the gate, and what does not.

    A line that cannot be written goes to the server's log: what it tells of has happened.

    Args:
        store: Has the audit log.
        now: A clock that never goes back, in seconds.
    """

    def __init__(self, store: Store, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._denials = RateLimiter(now)
        self._num_unwritten = 0

    def watching(self, scope: Scope, principal: Principal, send: Send) -> Send:
        """Sends on, once the line about it is written: whoever has an answer is in the log."""
        if scope["method"] in SAFE_METHODS:
            return send

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 403:  # what the body asks for needs another scope
                    await self.denied(scope, principal, "forbidden")
                elif message["status"] < 300 and scope["path"] not in COMPUTED:
                    location = Headers(raw=message.get("headers", [])).get("location", "")
                    await self._write(_event(scope, "ok", principal, location))
            await send(message)

        return watched

    async def signed_in(self, scope: Scope, principal: Principal) -> None:
        """Note that somebody gave a right token for a session."""
        await self._write(_event(scope, "ok", principal))

    async def denied(self, scope: Scope, principal: Principal | None, kind: str) -> None:
        """Note that a request was refused: as many a minute as `DENIALS_PER_MINUTE`."""
        if self._denials.take("", DENIALS_PER_MINUTE).is_exceeded:
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
    action, object_id = named(scope["method"], scope["path"])
    return AuditEvent(
        action=action,
        outcome=outcome,
        project_id=None if principal is None else principal.project_id,
        key_id=None if principal is None else principal.id,
        object_id=object_id or location.rpartition("/")[2] or None,
        request_id=request_id(),
        address=client[0] if client else None,
    )


def named(method: str, path: str) -> tuple[str, str | None]:
    """What a request does, and to what.

    ``POST /v1/plans`` is ``plans.create``, ``DELETE /v1/api-keys/key_1`` is ``api-keys.delete``
    of ``key_1``, ``POST /v1/jobs/job_1/cancel`` is ``jobs.cancel`` of ``job_1``; what else there
    is has its method and path for a name.
    """
    parts = path.removeprefix(API).split("/") if path.startswith(API) else []
    if 1 <= len(parts) <= 3 and all(re.fullmatch(r"[\w.-]{1,80}", part) for part in parts):
        verb = parts[2] if len(parts) == 3 else VERBS.get(method, "read")
        return f"{parts[0]}.{verb}", parts[1] if len(parts) > 1 else None
    return f"{method} {path}"[:MAX_CHARACTERS], None
