"""Settings of a client: the service's URL, the token and the time limit."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from urllib.parse import SplitResult, urlsplit

from ..core.errors import InvalidInput
from .sans_io import RetryBudget

SERVER_VARIABLE = "STAGEWRIGHT_SERVER"
TOKEN_VARIABLE = "STAGEWRIGHT_TOKEN"
DEFAULT_SERVER = "http://127.0.0.1:8000"
"""Default address of ``stagewright serve``."""

TIMEOUT_S = 120.0
"""Ample for the defaults: the service searches for a plan for 20 s, after estimating costs."""


@dataclass(frozen=True)
class ClientSettings:
    """Address and credentials of a service, and the time limit of one call, retries included."""

    url: str
    token: str | None = None
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    on_wait: Callable[[str], None] | None = None

    @classmethod
    def from_environment(
        cls,
        url: str | None,
        token: str | None,
        timeout_s: float = TIMEOUT_S,
        environment: Mapping[str, str] = os.environ,
        on_wait: Callable[[str], None] | None = None,
    ) -> ClientSettings:
        """Combine the given settings with the environment, which supplies what is `None`."""
        found = url or environment.get(SERVER_VARIABLE) or DEFAULT_SERVER
        if not timeout_s > 0:
            raise InvalidInput(f"timeout_s is {timeout_s}; give a positive number of seconds")
        token = token or environment.get(TOKEN_VARIABLE) or None
        return cls(_check_url(found), token, timeout_s, on_wait=on_wait)

    @property
    def retry_budget(self) -> RetryBudget:
        return RetryBudget(self.timeout_s, self.clock, address=self.url, on_wait=self.on_wait)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers sent with every request."""
        always = {
            "User-Agent": f"stagewright/{version('stagewright')}",
            "Accept": "application/json",
        }
        return always if self.token is None else {**always, "Authorization": f"Bearer {self.token}"}

    @property
    def uses_proxies(self) -> bool:
        """Return True if the environment's proxies apply."""
        # A proxy cannot reach this machine's own loopback address.
        return not is_loopback(urlsplit(self.url).hostname or "")


def _check_url(url: str) -> str:
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(
            f"{url!r} is not a valid service URL; use the form {DEFAULT_SERVER} (url=, --server "
            f"or {SERVER_VARIABLE})"
        )
    # The URL appears in messages and logs; a password in it would, too. It is not quoted here.
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidInput(
            "the service URL may contain only scheme, host, port and path; pass the token as "
            f"token=, --token or {TOKEN_VARIABLE}"
        )
    return url.rstrip("/")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed only when read; raises ValueError for port 99999
    except ValueError:
        return None
    return parts


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
