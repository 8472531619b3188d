"""What is told about each request: an id, a line in the log, numbers for the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.problems import internal_problem
from ..telemetry.log_context import REQUEST_ID_HEADER, accepted_request_id, fresh
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import PROBES

MAX_PATH_CHARACTERS = 200
UNMATCHED = "unmatched"
"""The route of what no route answers, so that strangers make no label of their own."""

_log = logging.getLogger("stagewright.access")
_errors = logging.getLogger(__name__)


class AccessLog:
    """Gives every request an id, and tells of it when it has been answered.

    The id is the caller's ``X-Request-ID`` if that is well formed. It is in the answer's header,
    in problems, in the audit log and in every line logged meanwhile.

    Args:
        app: The application behind; the outermost of ours.
        metrics: Counts requests.
        now: A clock that never goes back, in seconds.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        request_id = accepted_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        answered = _Answered(send, request_id)
        started = self._now()
        with fresh(request_id=request_id), self._metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive, answered.send)
            except Exception:
                if answered.status is not None:
                    raise  # half an answer is out; the connection has to be cut
                _errors.exception("this request could not be answered")
                await internal_problem().response()(scope, receive, answered.send)
            finally:
                self._tell(scope, answered, self._now() - started)

    def _tell(self, scope: Scope, answered: _Answered, duration_s: float) -> None:
        route, method = route_of(scope), scope["method"]
        self._metrics.answered(
            method, route, answered.status, None if answered.is_stream else duration_s
        )
        self._metrics.reused(answered.headers)
        status = answered.status
        quiet = scope["path"] in PROBES and status is not None and status < 400
        level = logging.DEBUG if quiet else logging.INFO
        fields: dict[str, Any] = {
            "method": method[:20],
            "route": route,
            "path": _path(scope),
            "status": status,
            "duration_s": round(duration_s, 6),
            "response_bytes": answered.num_bytes,
        }
        client = scope.get("client")
        if client:
            fields["address"] = client[0]
        _log.log(level, "request" if status is not None else "request cut off", extra=fields)


class _Answered:
    """Sends on, with the request's id, and remembers what was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        self.headers: Headers = Headers()
        self.num_bytes = 0

    @property
    def is_stream(self) -> bool:
        """Whether it lasts as long as its reader wants."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._request_id
            self.status, self.headers = message["status"], headers
        elif message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def route_of(scope: Scope) -> str:
    """The template that answered, e.g. ``/v1/plans/{plan_id}``."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNMATCHED


def _path(scope: Scope) -> str:
    """As it was sent, percent signs and all, so that it cannot write lines of its own."""
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    path: str = raw.partition(b"?")[0].decode("latin-1").encode("unicode_escape").decode("ascii")
    return path[:MAX_PATH_CHARACTERS]
