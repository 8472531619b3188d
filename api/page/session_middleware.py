"""What stands in front of the gate for browsers: a session's cookie becomes its token."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth.login_throttle import SIGNED_IN
from ..auth.scopes import SAFE_METHODS
from ..http.problems import Problem
from .sessions import Sessions, cookie_of


class SessionMiddleware:
    """Turns a session's cookie into the token it stands for.

    A cookie stands for a token only where no ``Authorization`` is sent. Browsers tell the origin
    of everything that changes something, which `OriginCheck` compares; a request with a cookie
    that changes something and has no origin is refused.

    Args:
        app: The application behind.
        sessions: Who has signed in.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._sign(scope)
            except Problem as problem:
                await problem.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _sign(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "authorization" in headers or "cookie" not in headers:
            return
        token = self._sessions.token(cookie_of(scope, headers["cookie"]))
        if token is None:
            return
        if scope["method"] not in SAFE_METHODS and "origin" not in headers:
            raise origin_missing()
        sent = (b"authorization", f"Bearer {token}".encode("latin-1"))
        scope["headers"] = [*scope["headers"], sent]
        scope.setdefault("state", {})[SIGNED_IN] = True


def origin_missing() -> Problem:
    """That what changes something for a browser does not say which page it comes from."""
    return Problem(
        403,
        "foreign-origin",
        "a browser's session changes nothing without the Origin header; programs send "
        "'Authorization: Bearer <token>' instead of a cookie",
    )
