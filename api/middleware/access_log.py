"""Access log: an id, a log line and metrics for each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.problems import internal_problem
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import PROBES, REQUEST_ID_HEADER, accepted_request_id, fresh
from .graceful_shutdown import GracefulShutdown
from .request_checks import shutdown_problem

MAX_PATH_CHARACTERS = 200
UNMATCHED = "unmatched"
"""Route label of unknown paths, so that clients cannot create metric labels."""

_log = logging.getLogger("stagewright.access")
_errors = logging.getLogger(__name__)


class AccessLog:
    """Middleware that gives every request an id, counts it in flight, and logs it once answered.

    The id is the client's ``X-Request-ID`` if that is well formed. It is in the response's header,
    in problem documents, in the audit log and in every line logged meanwhile.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        shutdown: GracefulShutdown,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._shutdown = shutdown
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        request_id = accepted_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        started = self._now()
        with (
            fresh(request_id=request_id),
            self._metrics.in_flight.track_inprogress(),
            self._shutdown.request() as release,
        ):
            response = _ResponseRecorder(send, request_id, release)
            try:
                await self._app(scope, receive, response.send)
            except asyncio.CancelledError:
                # At the end of the grace period the server cancels what is left, and would answer
                # with a bare 500.
                if response.status is not None or not self._shutdown.is_refusing:
                    raise
                await shutdown_problem().response()(scope, receive, response.send)
            except Exception:
                if response.status is not None:
                    raise  # half of the response is out; the server has to cut the connection
                _errors.exception("this request could not be answered")
                await internal_problem().response()(scope, receive, response.send)
            finally:
                self._log_response(scope, response, self._now() - started)

    def _log_response(self, scope: Scope, response: _ResponseRecorder, duration_s: float) -> None:
        route, method, status = route_of(scope), scope["method"], response.status
        self._metrics.answered(method, route, status, None if response.is_stream else duration_s)
        self._metrics.reused(response.headers)
        is_healthy_probe = scope["path"] in PROBES and status is not None and status < 400
        fields: dict[str, Any] = {
            "method": method[:20],
            "route": route,
            "path": _path(scope),
            "status": status,
            "duration_s": round(duration_s, 6),
            "response_bytes": response.num_bytes,
        }
        client = scope.get("client")
        if client:
            fields["address"] = client[0]
        level = logging.DEBUG if is_healthy_probe else logging.INFO
        _log.log(level, "request" if status is not None else "request cut off", extra=fields)


class _ResponseRecorder:
    """Sender that adds the request's id to a response and records its status and size.

    Args:
        send: Takes the messages.
        request_id: For the response's header.
        on_stream: Called when a stream of events starts: shutdown does not wait for it, since its
            reader continues it at another server.
    """

    def __init__(self, send: Send, request_id: str, on_stream: Callable[[], None]) -> None:
        self._send = send
        self._request_id = request_id
        self._on_stream = on_stream
        self.status: int | None = None
        self.headers: Headers = Headers()
        self.num_bytes = 0

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._request_id
            self.status, self.headers = message["status"], headers
            if self.is_stream:
                self._on_stream()
        elif message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def route_of(scope: Scope) -> str:
    """Return the template of the route, e.g. ``/v1/plans/{plan_id}``."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNMATCHED


def _path(scope: Scope) -> str:
    # The raw path, percent signs and all: decoded, it could break log lines in two.
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    path: str = raw.partition(b"?")[0].decode("latin-1").encode("unicode_escape").decode("ascii")
    return path[:MAX_PATH_CHARACTERS]
