"""Requests whose beginning or end could be read in two ways, or whose body is packed, are refused.

Between a client and this server there may be a proxy that reads them the other way; what the two
disagree on is how one request is smuggled inside another (RFC 9112, section 11.2).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.problems import Problem

VERSIONS = ("1.0", "1.1", "2")

MAX_TARGET_BYTES = 2**14


class FramingCheck:
    """Refuses what says its length twice, or names its host twice or in its target.

    Args:
        app: The application behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem.response()(scope, receive, send)


def _problem(scope: Scope) -> Problem | None:
    close = {"Connection": "close"}
    wrong = _wrong(scope)
    if wrong is not None:
        return Problem(400, "ambiguous-request", wrong, headers=close)
    if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > MAX_TARGET_BYTES:
        detail = f"the request's target is over {MAX_TARGET_BYTES} bytes; ask for less"
        return Problem(414, "target-too-long", detail, headers=close)
    if Headers(scope=scope).get("content-encoding", "identity").lower() != "identity":
        detail = "send the body as it is, without a Content-Encoding"
        return Problem(415, "unsupported-media-type", detail, headers=close)
    return None


def _wrong(scope: Scope) -> str | None:
    if scope["http_version"] not in VERSIONS:
        return f"this server speaks HTTP {', '.join(VERSIONS)}"
    headers = Headers(scope=scope)
    lengths, codings = headers.getlist("content-length"), headers.getlist("transfer-encoding")
    if len(lengths) > 1 or not all(length.isascii() and length.isdigit() for length in lengths):
        return "send one Content-Length, in digits"
    if lengths and codings:
        return "send a Content-Length or a Transfer-Encoding, not both"
    if codings and [coding.strip().lower() for coding in codings] != ["chunked"]:
        return "the only Transfer-Encoding this server takes is 'chunked'"
    if len(headers.getlist("host")) > 1:
        return "send one Host"
    if not scope.get("raw_path", b"/").startswith(b"/"):
        return "the request's target has to begin with a slash"
    return None
