"""Responses for browsers: large ones compressed, pages secured, problem documents as pages.

Compression was measured (docs/service/page.md): a timeline of 370 kB becomes 41 kB in a
millisecond. Starlette's ``GZipMiddleware`` compresses on the event loop and leaves entity tags
strong.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.access import OPEN_FILES, SAFE_METHODS, is_page
from ..http.threads import in_busy_thread

MIN_BYTES = 4096
"""Smaller responses fit into three packets anyway."""

LEVEL = 1
"""zlib's fastest level compresses a timeline to a ninth; level 6 takes four times as long."""

IN_THREAD_BYTES = 64 * 2**10
"""Larger responses take over half a millisecond, in which the event loop serves others."""

LARGE = frozenset({"/v1/views", "/v1/capabilities"})
LARGE_SUFFIX = "/view"
LARGE_QUERY = b"format="
"""Signs of large responses of the API; its other responses are left alone."""

COMPRESSED_TYPES = frozenset(
    {"text/html", "text/css", "text/csv", "text/javascript", "application/json", "image/svg+xml"}
)
GZIP = 16 + zlib.MAX_WBITS


class Compression:
    """Middleware that compresses pages, their files, and views of plans.

    A compressed response's strong entity tag becomes weak (RFC 9110, section 8.8.1), since its
    bytes differ, and so does that of a 304 to a client with a compressed copy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and may_be_large(scope["path"], scope["query_string"]):
            headers = Headers(scope=scope)
            accepted = ",".join(headers.getlist("accept-encoding"))
            is_accepted = accepts_gzip(accepted) and scope["method"] != "HEAD"
            send = _GzipSender(send, is_accepted, headers.get("if-none-match", "")).send
        await self._app(scope, receive, send)


def may_be_large(path: str, query: bytes) -> bool:
    """Return True for requests whose responses are worth compressing."""
    return (
        is_page(path)
        or path.startswith(OPEN_FILES)
        or path in LARGE
        or path.endswith(LARGE_SUFFIX)
        or query.startswith(LARGE_QUERY)
    )


def accepts_gzip(accepted: str) -> bool:
    """Return True if an ``Accept-Encoding`` names gzip with a weight above zero."""
    for entry in accepted.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() == "gzip":
            return weight.strip().rstrip("0.") != "q="
    return False


class _GzipSender:
    """Sender that compresses a response if the client accepts it and it is large enough."""

    def __init__(self, send: Send, is_accepted: bool, known_tags: str) -> None:
        self._send = send
        self._is_accepted = is_accepted
        self._known_tags = known_tags
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.add_vary_header("Accept-Encoding")
            if message["status"] == 304 and f"W/{headers.get('etag')}" in self._known_tags:
                _weaken_tag(headers)
            if self._is_accepted and _is_compressible(headers):
                self._start = message  # held back until the compressed length is known
                return
        elif self._start is not None:
            start, self._start = self._start, None
            body = message.get("body", b"")
            if len(body) >= MIN_BYTES and not message.get("more_body"):
                message = {**message, "body": await _compress(body)}
                headers = MutableHeaders(scope=start)
                headers["Content-Encoding"] = "gzip"
                headers["Content-Length"] = str(len(message["body"]))
                _weaken_tag(headers)
            await self._send(start)
        await self._send(message)


def _is_compressible(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind in COMPRESSED_TYPES and "content-encoding" not in headers


async def _compress(body: bytes) -> bytes:
    if len(body) < IN_THREAD_BYTES:
        return zlib.compress(body, LEVEL, GZIP)
    return await in_busy_thread(zlib.compress, body, LEVEL, GZIP)


def _weaken_tag(headers: MutableHeaders) -> None:
    tag = headers.get("etag", "")
    if tag.startswith('"'):
        headers["ETag"] = f"W/{tag}"


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
NOSNIFF = (b"x-content-type-options", b"nosniff")
SECURITY = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",  # with none, a form's Origin would be null
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of pages and of the files they load."""

SIGN_IN = "/sign-in"
SIGNING = frozenset({SIGN_IN, "/sign-out"})

REPLACED = frozenset({b"content-type", b"content-length", b"www-authenticate"})
"""Headers of a problem document that its HTML page replaces."""

ErrorPage = Callable[[dict[str, Any]], str]


class Pages:
    """Middleware that adds security headers, ``nosniff`` to all, and renders problems as HTML.

    This middleware is outside of all that respond, so that bugs and refused host names become
    pages, too. A client that accepts HTML and not JSON is taken for a browser; without a session it
    is redirected to sign in.
    """

    def __init__(self, app: ASGIApp, error_page: ErrorPage) -> None:
        self._app = app
        self._error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        accept = Headers(scope=scope).get("accept", "")
        if "text/html" in accept and "json" not in accept:
            send = _Browser(scope, receive, send, self._error_page).send
        await self._app(scope, receive, _with_headers(send, is_shown(scope["path"])))


def is_shown(path: str) -> bool:
    """Return True if a path is a page for people."""
    return is_page(path) or path in SIGNING


def _with_headers(send: Send, is_shown: bool) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), NOSNIFF]
            if is_shown:
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY)
                headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sent


class _Browser:
    """Send function that replaces problem documents by HTML pages and passes on the rest."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, error_page: ErrorPage) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._error_page = error_page
        self._problem: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_problem(message):
            self._problem = message
        elif self._problem is None:
            await self._send(message)
        else:
            # Problem documents are small, so that buffering one costs nothing.
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._instead(self._problem)(self._scope, self._receive, self._send)

    def _instead(self, problem: Message) -> Response:
        path, status = self._scope["path"], problem["status"]
        answer: Response
        if status == 401 and self._scope["method"] in SAFE_METHODS:
            query = self._scope.get("query_string", b"").decode("latin-1")
            # Pages can be returned to after signing in; a form that was sent cannot.
            wanted = quote(path + (f"?{query}" if query else ""), safe="")
            answer = RedirectResponse(f"{SIGN_IN}?next={wanted}", 303)
        else:
            html = self._error_page(json.loads(self._body))
            answer = Response(html, status, media_type="text/html")
        kept = [entry for entry in problem["headers"] if entry[0].lower() not in REPLACED]
        answer.raw_headers.extend(kept)
        answer.headers.update({**SECURITY, "Cache-Control": "no-store"})
        return answer


def _is_problem(message: Message) -> bool:
    kind = Headers(raw=message.get("headers", [])).get("content-type", "")
    return kind.startswith("application/problem+json")
