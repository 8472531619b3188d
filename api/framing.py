"""Requests whose beginning or end could be read in two ways are refused.

Between a client and this server there may be a proxy that reads them the other way; what the two
disagree on is how one request is smuggled inside another (RFC 9112, section 11.2).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .problems import Problem


class FramingCheck:
    """Refuses what says its length twice, or names its host twice or in its target.

    Args:
        app: The application behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = _wrong(scope) if scope["type"] == "http" else None
        if wrong is None:
            await self._app(scope, receive, send)
            return
        problem = Problem(400, "ambiguous-request", wrong, headers={"Connection": "close"})
        await problem.response()(scope, receive, send)


def _wrong(scope: Scope) -> str | None:
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
    if any(ord(character) < 32 for character in scope["path"]):
        return "the request's path has control characters"
    return None
