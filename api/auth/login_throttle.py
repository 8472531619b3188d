"""Login throttle: wrong tokens are counted by the network address they come from."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

WRONG_AT_ONCE = 10
"""Wrong tokens an address may send without waiting."""

SECONDS_EACH = 6.0
"""Wait for each further wrong token: 10 a minute, 14,400 a day."""

MAX_ADDRESSES = 10_000
"""Addresses remembered; beyond that the one quiet for longest is forgotten."""

NETWORK_BITS = 64
"""Prefix of an IPv6 address that counts as one sender: its owner has all addresses below it."""


class LoginThrottle:
    """Leaky bucket of wrong tokens for each address; used on the event loop's thread only.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # By address, when its bucket will have leaked dry. Ordered by the last failure, so that
        # the first entry is the one to forget.
        self._empty_at: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, scope: Scope | None) -> int:
        """Return how long the sender of a request has to wait before its next guess, or 0."""
        if not self._empty_at or scope is None:
            return 0
        over_s = self._empty_at.get(_sender(scope), 0.0) - self._now()
        return max(0, math.ceil(over_s - (WRONG_AT_ONCE - 1) * SECONDS_EACH))

    def record_failure(self, scope: Scope | None) -> None:
        """Count a wrong token."""
        sender = "" if scope is None else _sender(scope)
        if not sender:
            return
        start = max(self._now(), self._empty_at.pop(sender, 0.0))
        self._empty_at[sender] = start + SECONDS_EACH
        if len(self._empty_at) > MAX_ADDRESSES:
            self._empty_at.popitem(last=False)


def _sender(scope: Scope) -> str:
    """Return the address or IPv6 network to charge, or "" if there is none."""
    client = scope.get("client")
    if client is None:
        return ""
    name = str(client[0])
    try:
        address = ip_address(name)
    except ValueError:
        return name
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(IPv6Network((address, NETWORK_BITS), strict=False))
    return name
