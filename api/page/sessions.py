"""Who has signed in with a browser, until they sign out or the time is over."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import cookie_parser
from starlette.types import Scope

LIFETIME_S = 12 * 3600
MAX_SESSIONS = 1000


class Sessions:
    """Keeps, for the value of a cookie, the token somebody signed in with.

    The token itself is identified anew for every request, so a revoked key opens nothing here
    either. All is in memory: when the server ends, everybody signs in again.

    Args:
        now: A clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._tokens: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, token: str) -> str:
        """The value of a new session's cookie; the oldest ends where there are too many."""
        value = secrets.token_urlsafe(32)
        with self._lock:
            self._tokens[value] = (token, self._now() + LIFETIME_S)
            while len(self._tokens) > MAX_SESSIONS:
                self._tokens.popitem(last=False)
        return value

    def token(self, value: str) -> str | None:
        """What somebody signed in with; `None` if there is no such session, or no more."""
        with self._lock:
            token, end_s = self._tokens.get(value, ("", 0.0))
            if not token:
                return None
            if end_s <= self._now():
                del self._tokens[value]
                return None
            return token

    def close(self, value: str) -> None:
        """End a session, if there is one."""
        with self._lock:
            self._tokens.pop(value, None)


def cookie_name(scope: Scope) -> str:
    """Browsers send a cookie to every port of a name; each server on this machine has its own."""
    server = scope.get("server")
    return f"stagewright_{server[1] if server else 0}"


def cookie_of(scope: Scope, header: str) -> str:
    """This server's session in a ``Cookie`` header; empty if there is none."""
    return cookie_parser(header).get(cookie_name(scope), "")
