"""Where the service is, and who asks."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from urllib.parse import SplitResult, urlsplit

from ..core.errors import InvalidInput
from .sans_io import Patience

SERVER_VARIABLE = "STAGEWRIGHT_SERVER"
TOKEN_VARIABLE = "STAGEWRIGHT_TOKEN"
DEFAULT_SERVER = "http://127.0.0.1:8000"
"""Where ``stagewright serve`` listens unless told otherwise."""

TIMEOUT_S = 120.0
"""A service searches for a plan for 20 s unless told otherwise, and estimates before that."""


@dataclass(frozen=True)
class Settings:
    """How a client reaches its service.

    Attributes:
        url: Without a slash at its end.
        token: Sent as a bearer token.
        timeout_s: For one answer, with every attempt at it.
        clock: Seconds that never go back.
        on_wait: Told, in words, that the service does not answer and is waited for.
    """

    url: str
    token: str | None = None
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    on_wait: Callable[[str], None] | None = None

    @classmethod
    def of(
        cls,
        url: str | None,
        token: str | None,
        timeout_s: float = TIMEOUT_S,
        environment: Mapping[str, str] = os.environ,
        on_wait: Callable[[str], None] | None = None,
    ) -> Settings:
        """What was given, and where nothing was, what the environment says.

        Raises:
            InvalidInput: The address is none, or the time is not positive.
        """
        found = url or environment.get(SERVER_VARIABLE) or DEFAULT_SERVER
        if not timeout_s > 0:
            raise InvalidInput(f"timeout_s is {timeout_s}; give a positive number of seconds")
        token = token or environment.get(TOKEN_VARIABLE) or None
        return cls(_checked(found), token, timeout_s, on_wait=on_wait)

    @property
    def patience(self) -> Patience:
        return Patience(self.timeout_s, self.clock, address=self.url, on_wait=self.on_wait)

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        always = {
            "User-Agent": f"stagewright/{version('stagewright')}",
            "Accept": "application/json",
        }
        return always if self.token is None else {**always, "Authorization": f"Bearer {self.token}"}

    @property
    def uses_proxies(self) -> bool:
        """Whether the proxies of the environment count: none of them could reach this machine."""
        return not is_loopback(urlsplit(self.url).hostname or "")


def _checked(url: str) -> str:
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(
            f"{url!r} is no address of a service; write one like {DEFAULT_SERVER} (url=, --server "
            f"or {SERVER_VARIABLE})"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidInput(
            "the service's address has more than scheme, host, port and path; give the token as "
            f"token=, --token or {TOKEN_VARIABLE}"
        )
    return url.rstrip("/")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
