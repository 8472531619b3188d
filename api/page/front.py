"""What stands in front of the gate for browsers: sessions, and errors as pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth.scopes import SAFE_METHODS, is_page
from ..problems import Problem
from .sessions import Sessions, cookie_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with none, a form's Origin would be null
    "Cross-Origin-Opener-Policy": "same-origin",
}

SIGN_IN = "/sign-in"

ErrorPage = Callable[[dict[str, Any]], str]


class Front:
    """Turns a session's cookie into the token it stands for, and problems into pages.

    Who does not ask for HTML gets problem documents from pages, too.

    A cookie stands for a token only where no ``Authorization`` is sent. Browsers tell the origin
    of everything that changes something, which `OriginCheck` compares; a request with a cookie
    that changes something and has no origin is refused.

    Args:
        app: The application behind.
        sessions: Who has signed in.
        error_page: HTML of a problem document.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, error_page: ErrorPage) -> None:
        self._app = app
        self._sessions = sessions
        self._error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope = self._with_token(scope)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        is_shown = is_page(scope["path"]) or scope["path"] == SIGN_IN
        if is_shown and "text/html" in Headers(scope=scope).get("accept", ""):
            answer = _Page(scope, receive, send, self._error_page)
            await self._app(scope, receive, answer.send)
        else:
            await self._app(scope, receive, send)

    def _with_token(self, scope: Scope) -> Scope:
        headers = Headers(scope=scope)
        if "authorization" in headers or "cookie" not in headers:
            return scope
        token = self._sessions.token(cookie_of(scope, headers["cookie"]))
        if token is None:
            return scope
        if scope["method"] not in SAFE_METHODS and "origin" not in headers:
            raise Problem(
                403,
                "foreign-origin",
                "a browser's session changes nothing without the Origin header; programs send "
                "'Authorization: Bearer <token>' instead of a cookie",
            )
        sent = (b"authorization", f"Bearer {token}".encode("latin-1"))
        return {**scope, "headers": [*scope["headers"], sent]}


class _Page:
    """Sends a page on, and instead of a problem document, a page about it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, error_page: ErrorPage) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._error_page = error_page
        self._status = 0
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 400 and _is_problem(message):
                self._status = message["status"]
                return
            headers = MutableHeaders(scope=message)
            headers.update(SECURITY)
            headers.setdefault("Cache-Control", "no-store")
        elif self._status:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._instead()(self._scope, self._receive, self._send)
            return
        await self._send(message)

    def _instead(self) -> Response:
        path = self._scope["path"]
        if self._status == 401:
            query = self._scope.get("query_string", b"").decode("latin-1")
            wanted = quote(path + (f"?{query}" if query else ""), safe="")
            return RedirectResponse(f"{SIGN_IN}?next={wanted}", 303, SECURITY)
        html = self._error_page(json.loads(self._body))
        headers = {**SECURITY, "Cache-Control": "no-store"}
        return Response(html, self._status, headers, "text/html")


def _is_problem(message: Message) -> bool:
    kind = Headers(raw=message.get("headers", [])).get("content-type", "")
    return kind.startswith("application/problem+json")
