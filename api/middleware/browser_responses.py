"""Responses for browsers: pages secured, problem documents as pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.access import SAFE_METHODS, is_page

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
