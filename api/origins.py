"""Which pages may talk to the server.

A browser tells which page made a request in ``Origin``. Its own pages are served from the address
they ask; a page of anybody else has no business here, whatever token it got hold of.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .problems import Problem


class OriginCheck:
    """Refuses what pages of other origins send; programs send no ``Origin``.

    The origin's host and port have to be those of ``Host``. The scheme is not compared: a proxy
    that ends TLS would change it.

    Args:
        app: The application behind.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_own(Headers(scope=scope)):
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


def _is_own(headers: Headers) -> bool:
    origins, hosts = headers.getlist("origin"), headers.getlist("host")
    if not origins:
        return True
    if len(origins) != 1 or len(hosts) != 1:
        return False
    try:
        origin = urlsplit(origins[0])
    except ValueError:
        return False
    return origin.scheme in ("http", "https") and origin.netloc.lower() == hosts[0].lower()
