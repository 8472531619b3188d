"""Compression of large responses with gzip.

Measured (docs/page.md): a timeline of 370 kB becomes 41 kB in a millisecond. Starlette's
``GZipMiddleware`` compresses on the event loop and leaves entity tags strong.
"""

from __future__ import annotations

import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.scopes import OPEN_FILES, is_page
from ..http.threads import in_busy_thread

MIN_BYTES = 4096
"""Smaller responses fit into three packets anyway."""

LEVEL = 1
"""zlib's fastest level compresses a timeline to a ninth; level 6 takes four times as long."""

IN_THREAD_BYTES = 64 * 2**10
"""Larger responses take over half a millisecond, in which the event loop serves others."""

VIEWS = frozenset({"/v1/views"})
VIEW_SUFFIXES = ("/view", "/timeline", "/schedule", "/export")
"""Ends of the paths of large responses; other responses of the API are left alone."""

COMPRESSED_TYPES = frozenset(
    {"text/html", "text/css", "text/csv", "text/javascript", "application/json", "image/svg+xml"}
)
GZIP = 16 + zlib.MAX_WBITS


class Compression:
    """Compresses pages, their files, and views of plans.

    A compressed response's strong entity tag becomes weak (RFC 9110, section 8.8.1), since its
    bytes differ, and so does that of a 304 to a client with a compressed copy.

    Args:
        app: The application behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and may_be_large(scope["path"]):
            headers = Headers(scope=scope)
            accepted = ",".join(headers.getlist("accept-encoding"))
            is_accepted = accepts_gzip(accepted) and scope["method"] != "HEAD"
            send = _GzipSender(send, is_accepted, headers.get("if-none-match", "")).send
        await self._app(scope, receive, send)


def may_be_large(path: str) -> bool:
    """Return True for paths whose responses are worth compressing."""
    return (
        is_page(path)
        or path.startswith(OPEN_FILES)
        or path in VIEWS
        or path.endswith(VIEW_SUFFIXES)
    )


def accepts_gzip(accepted: str) -> bool:
    """Return True if an ``Accept-Encoding`` names gzip with a weight above zero."""
    for entry in accepted.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() == "gzip":
            return weight.strip().rstrip("0.") != "q="
    return False


class _GzipSender:
    """Sends a response on, compressed if the client accepts it and it is large enough.

    Args:
        send: Takes the messages.
        is_accepted: True if the client accepts gzip.
        known_tags: ``If-None-Match`` of the request.
    """

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
