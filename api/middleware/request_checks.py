"""Request checks: shutdown, request framing, ``Host`` and ``Origin``, before anything is read.

They need no token, and refuse with the headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth.access import SAFE_METHODS
from ..http.problems import RETRY_AFTER_S, Problem
from .graceful_shutdown import GracefulShutdown

VERSIONS = ("1.0", "1.1", "2")
MAX_TARGET_BYTES = 2**14
LOOPBACK = frozenset({"127.0.0.1", "::1"})
CLOSE = {"Connection": "close"}

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?")


class RequestChecks:
    """Middleware that refuses what no route should see; ``allowed_hosts`` are without port."""

    def __init__(
        self, app: ASGIApp, shutdown: GracefulShutdown, allowed_hosts: Iterable[str] | None
    ) -> None:
        self._app = app
        self._shutdown = shutdown
        self._hosts = None if allowed_hosts is None else {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None if scope["type"] == "lifespan" else self._problem(scope)
        if problem is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await problem.response()(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        if scope["type"] == "http":
            if self._shutdown.is_refusing and begins_work(scope):
                return shutdown_problem()
            # Framing first: until it is sound, the other headers may belong to another request.
            problem = framing_problem(scope)
            if problem is not None:
                return problem
        if self._hosts is not None and host_name(scope) not in self._hosts:
            detail = "This server answers to loopback names only, e.g. 127.0.0.1."
            return Problem(400, "invalid-host", detail)
        if not is_same_origin(scope):
            return Problem(
                403,
                "foreign-origin",
                "Pages of other origins may not use this server. Behind a proxy, have it pass the "
                "Host header on.",
            )
        return None


def begins_work(scope: Scope) -> bool:
    """Return False for requests that only read, delete or cancel."""
    return (
        scope["method"] not in SAFE_METHODS
        and scope["method"] != "DELETE"
        and not scope["path"].endswith("/cancel")
    )


def shutdown_problem() -> Problem:
    """Return the refusal of new work during shutdown."""
    return Problem(
        503,
        "service-stopping",
        f"This server is shutting down. Retry in {RETRY_AFTER_S} s.",
        headers={"Retry-After": str(RETRY_AFTER_S), **CLOSE},
    )


def framing_problem(scope: Scope) -> Problem | None:
    """Return the refusal of an ambiguous, overlong or encoded request.

    A proxy in front may read an ambiguous request differently from this server, and the difference
    smuggles one request inside another (RFC 9112, section 11.2).
    """
    headers = Headers(scope=scope)
    ambiguity = _ambiguity(scope, headers)
    if ambiguity is not None:
        return Problem(400, "ambiguous-request", ambiguity, headers=CLOSE)
    if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > MAX_TARGET_BYTES:
        detail = f"The request's target is longer than {MAX_TARGET_BYTES} bytes. Ask for less."
        return Problem(414, "target-too-long", detail, headers=CLOSE)
    if headers.get("content-encoding", "identity").lower() != "identity":
        # A small encoded body may decode to any size, past the body limit.
        detail = "Send the body without a Content-Encoding."
        return Problem(415, "unsupported-media-type", detail, headers=CLOSE)
    return None


def _ambiguity(scope: Scope, headers: Headers) -> str | None:
    if scope["http_version"] not in VERSIONS:
        return f"This server supports HTTP {', '.join(VERSIONS)}."
    lengths, codings = headers.getlist("content-length"), headers.getlist("transfer-encoding")
    if len(lengths) > 1 or not all(length.isascii() and length.isdigit() for length in lengths):
        return "Send one Content-Length, in digits."
    if lengths and codings:
        return "Send a Content-Length or a Transfer-Encoding, not both."
    if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
        return "The only Transfer-Encoding supported is 'chunked'."
    if len(headers.getlist("host")) > 1:
        return "Send one Host header."
    # The absolute form, "GET http://other/ HTTP/1.1", names a second host.
    if not scope.get("raw_path", b"/").startswith(b"/"):
        return "The request's target has to begin with a slash."
    return None


def host_name(scope: Scope) -> str | None:
    """Return the lower-case name in the ``Host`` header, or None if there is not one valid name.

    A page in a browser can make its own name resolve to 127.0.0.1 (DNS rebinding) and then use a
    loopback server as its own origin. Its requests carry that name.
    """
    sent = Headers(scope=scope).getlist("host")
    match = _HOST.fullmatch(sent[0]) if len(sent) == 1 else None
    return None if match is None else (match["ipv6"] or match["name"]).lower()


def is_same_origin(scope: Scope) -> bool:
    """Return True if the request comes from a page of this server, or from no page at all.

    Programs send no ``Origin``. An origin's host and port have to be those of ``Host``, and its
    scheme the request's own, which a proxy on this machine gives in ``X-Forwarded-Proto``.
    """
    headers = Headers(scope=scope)
    origins, hosts = headers.getlist("origin"), headers.getlist("host")
    if not origins:
        return True
    if len(origins) != 1 or len(hosts) != 1:
        return False
    try:
        origin = urlsplit(origins[0])
    except ValueError:
        return False
    if origin.netloc.lower() != hosts[0].lower():
        return False
    if origin.scheme == scope.get("scheme", "http"):
        return origin.scheme in ("http", "https")
    # A proxy that ends TLS without X-Forwarded-Proto makes http of https. That is accepted, except
    # from a page on the very address this server listens on, where no proxy can be in between.
    return origin.scheme == "https" and not _is_own_address(origin.netloc, scope)


def _is_own_address(netloc: str, scope: Scope) -> bool:
    """Return True if a network location is the address and port the request arrived at."""
    server = scope.get("server")
    if server is None:
        return False
    address = f"[{server[0]}]" if ":" in server[0] else server[0]
    names = {address, "localhost"} if server[0] in LOOPBACK else {address}
    return netloc.lower() in {f"{name}:{server[1]}" for name in names}
