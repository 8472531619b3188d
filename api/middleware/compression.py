"""Large answers are packed on their way, for who takes that."""

from __future__ import annotations

import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.scopes import OPEN_FILES, is_page
from ..http.threads import in_busy_thread

MIN_BYTES = 4096
"""Below that an answer fits into three packets anyway."""

LEVEL = 1
"""Of zlib. The fastest packs a timeline to a ninth; the sixth level takes four times as long."""

IN_THREAD_BYTES = 64 * 2**10
"""From there on it takes half a millisecond and more, in which others are answered."""

DRAWN = frozenset({"/v1/views"})
DRAWINGS = ("/view", "/timeline", "/schedule", "/export")
"""How paths of large answers end; other answers of the API are left alone."""

PACKED_TYPES = frozenset(
    {"text/html", "text/css", "text/csv", "text/javascript", "application/json", "image/svg+xml"}
)
GZIP = 16 + zlib.MAX_WBITS


class Compression:
    """Packs pages, their files, and drawings of plans, with gzip.

    A packed answer's strong entity tag becomes weak (RFC 9110, section 8.8.1): the same in
    meaning, not in bytes. So does that of a 304 for who holds a packed answer.

    Args:
        app: The application behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and may_be_large(scope["path"]):
            headers = Headers(scope=scope)
            accepted = ",".join(headers.getlist("accept-encoding"))
            is_taken = takes_gzip(accepted) and scope["method"] != "HEAD"
            send = _Packing(send, is_taken, headers.get("if-none-match", "")).send
        await self._app(scope, receive, send)


def may_be_large(path: str) -> bool:
    """Whether answers to a path are worth packing."""
    return is_page(path) or path.startswith(OPEN_FILES) or path in DRAWN or path.endswith(DRAWINGS)


def takes_gzip(accepted: str) -> bool:
    """What an ``Accept-Encoding`` says of gzip, which has to be named in it."""
    for entry in accepted.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() == "gzip":
            return weight.strip().rstrip("0.") != "q="
    return False


class _Packing:
    """Sends on, packed where that pays and its receiver takes it.

    Args:
        send: Takes what is sent on.
        is_taken: Whether the receiver does.
        held: Tags of what the receiver holds.
    """

    def __init__(self, send: Send, is_taken: bool, held: str) -> None:
        self._send = send
        self._is_taken = is_taken
        self._held = held
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.add_vary_header("Accept-Encoding")
            if message["status"] == 304 and f"W/{headers.get('etag')}" in self._held:
                _weaken(headers)
            if self._is_taken and _can_be_packed(headers):
                self._start = message  # its length is not known yet
                return
        elif self._start is not None:
            start, self._start = self._start, None
            body = message.get("body", b"")
            if len(body) >= MIN_BYTES and not message.get("more_body"):
                message = {**message, "body": await _packed(body)}
                _say_packed(MutableHeaders(scope=start), len(message["body"]))
            await self._send(start)
        await self._send(message)


def _can_be_packed(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind in PACKED_TYPES and "content-encoding" not in headers


async def _packed(body: bytes) -> bytes:
    if len(body) < IN_THREAD_BYTES:
        return _gzip(body)
    return await in_busy_thread(_gzip, body)


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, LEVEL, GZIP)


def _say_packed(headers: MutableHeaders, length: int) -> None:
    headers["Content-Encoding"] = "gzip"
    headers["Content-Length"] = str(length)
    _weaken(headers)


def _weaken(headers: MutableHeaders) -> None:
    tag = headers.get("etag", "")
    if tag.startswith('"'):
        headers["ETag"] = f"W/{tag}"
