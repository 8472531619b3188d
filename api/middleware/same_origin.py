"""Which pages may talk to the server.

A browser tells which page made a request in ``Origin``. Its own pages are served from the address
they ask; a page of anybody else has no business here, whatever token it got hold of.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.problems import Problem

LOOPBACK = frozenset({"127.0.0.1", "::1"})


class OriginCheck:
    """Refuses what pages of other origins send; programs send no ``Origin``.

    The origin's host and port have to be those of ``Host``, and its scheme the request's own,
    which a proxy on this machine tells by ``X-Forwarded-Proto``. A proxy that ends TLS and does
    not tell makes https of what arrives as http; so that is taken, except from a page on the very
    address this server listens on, where nobody can end TLS.

    Args:
        app: The application behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_own(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        problem = Problem(
            403,
            "foreign-origin",
            "pages of other origins may not ask this server; behind a proxy, have it pass the "
            "Host header on",
        )
        await problem.response()(scope, receive, send)


def _is_own(scope: Scope) -> bool:
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
    return origin.scheme == "https" and not _listens_on(origin.netloc, scope)


def _listens_on(netloc: str, scope: Scope) -> bool:
    """Whether that is the address and port a request arrived at, without anybody between."""
    server = scope.get("server")
    if server is None:
        return False
    address = f"[{server[0]}]" if ":" in server[0] else server[0]
    names = {address, "localhost"} if server[0] in LOOPBACK else {address}
    return netloc.lower() in {f"{name}:{server[1]}" for name in names}
