"""How fast somebody may guess: wrong tokens are counted by the address they come from."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

from ..http.problems import Problem

WRONG_AT_ONCE = 10
"""Wrong tokens an address may send without waiting."""

SECONDS_EACH = 6.0
"""What each further one takes: 10 a minute, 14,400 a day."""

MAX_ADDRESSES = 10_000
"""Remembered; beyond that the one that has been quiet longest is forgotten."""

NETWORK_BITS = 64
"""Of an IPv6 address: whoever has one has all that begin alike."""


class LoginThrottle:
    """A bucket of wrong tokens for each address; it belongs to the event loop's thread.

    Args:
        now: A clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._empty_at: OrderedDict[str, float] = OrderedDict()
        """When all an address sent will have been worked off."""

    def wait_s(self, scope: Scope | None) -> int:
        """For how long the sender of a request should guess no more; 0 if it may."""
        if not self._empty_at or scope is None:
            return 0
        over_s = self._empty_at.get(_sender(scope), 0.0) - self._now()
        return max(0, math.ceil(over_s - (WRONG_AT_ONCE - 1) * SECONDS_EACH))

    def failed(self, scope: Scope | None) -> None:
        """Count a wrong token."""
        sender = "" if scope is None else _sender(scope)
        if not sender:
            return
        start = max(self._now(), self._empty_at.pop(sender, 0.0))
        self._empty_at[sender] = start + SECONDS_EACH
        if len(self._empty_at) > MAX_ADDRESSES:
            self._empty_at.popitem(last=False)


def too_many(wait_s: int) -> Problem:
    """That no token of this address is looked at now."""
    return Problem(
        429,
        "too-many-wrong-tokens",
        f"too many wrong tokens came from this address; ask again in {wait_s} s, or use an API "
        "key, which is answered meanwhile",
        headers={"Retry-After": str(wait_s)},
    )


def _sender(scope: Scope) -> str:
    """Whose guess a request's token is; empty if it is none, or nobody knows."""
    client = scope.get("client")
    if client is None:
        return ""
    said = str(client[0])
    try:
        address = ip_address(said)
    except ValueError:
        return said
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Network((address, NETWORK_BITS), strict=False))
    return said
