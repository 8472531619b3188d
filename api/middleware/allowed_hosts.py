"""Which names the server answers to.

A page in a browser on this machine can make its own name resolve to 127.0.0.1 (DNS rebinding)
and then talk to a loopback server as its own origin. Its requests carry that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.problems import Problem

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(?::\d{1,5})?")


class HostCheck:
    """Refuses a request whose ``Host`` header names another host.

    Args:
        app: The application behind.
        allowed: Names without port, IPv6 addresses without brackets; `None` lets all through.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str] | None) -> None:
        self._app = app
        self._allowed = None if allowed is None else {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed is None or self._fits(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        problem = Problem(
            400, "invalid-host", "this server answers to a loopback name only, e.g. 127.0.0.1"
        )
        await problem.response()(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        sent = Headers(scope=scope).getlist("host")
        match = _HOST.fullmatch(sent[0]) if len(sent) == 1 else None
        return match is not None and (match["ipv6"] or match["name"]).lower() in (
            self._allowed or ()
        )
