"""How many requests somebody may send a minute: a bucket of tokens each.

A bucket holds a minute's worth and fills steadily; a request takes one. So a pause is made up for
by a burst, and nobody gets more than twice the quota in any minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Lock

from ..http.problems import Problem

PERIOD_S = 60.0
MAX_BUCKETS = 10_000
"""Beyond this, buckets that are full again are forgotten: they say nothing."""


class RateStatus:
    """What one request left.

    Attributes:
        quota: Requests a minute.
        remaining: Whole requests left now.
        wait_s: Until there is one more; 0 if there is one.
        is_exceeded: Whether this request was one too many.
    """

    def __init__(self, quota: int, tokens: float, *, is_exceeded: bool) -> None:
        self.quota = quota
        self.remaining = int(tokens)
        self.wait_s = 0 if tokens >= 1 else math.ceil((1 - tokens) * PERIOD_S / quota)
        self.is_exceeded = is_exceeded

    def headers(self) -> dict[str, str]:
        """As the IETF's draft on RateLimit fields writes them (httpapi-ratelimit-headers-10)."""
        policy = f'"minute";q={self.quota};w={PERIOD_S:.0f}'
        return {
            "RateLimit-Policy": policy,
            "RateLimit": f'"minute";r={self.remaining};t={self.wait_s}',
        }

    def problem(self) -> Problem:
        """That the request is not answered now."""
        return Problem(
            429,
            "too-many-requests",
            f"this key may send {self.quota} requests a minute; ask again in {self.wait_s} s",
            headers={"Retry-After": str(self.wait_s), **self.headers()},
        )


class RateLimiter:
    """Counts requests, in this process alone. It may be called from several threads.

    Args:
        now: A clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._buckets: dict[str, tuple[float, float, float]] = {}  # tokens, when, a second's worth
        self._lock = Lock()

    def take(self, who: str, quota: int) -> RateStatus:
        """Count a request of somebody who may send so many a minute."""
        with self._lock:
            now, a_second = self._now(), quota / PERIOD_S
            tokens, before, _ = self._buckets.get(who, (float(quota), now, a_second))
            tokens = min(quota, tokens + (now - before) * a_second)
            is_exceeded = tokens < 1
            if not is_exceeded:
                tokens -= 1
            if who not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
                self._forget(now)
            self._buckets[who] = (tokens, now, a_second)
        return RateStatus(quota, tokens, is_exceeded=is_exceeded)

    def _forget(self, now: float) -> None:
        self._buckets = {
            who: (tokens, before, a_second)
            for who, (tokens, before, a_second) in self._buckets.items()
            if tokens + (now - before) * a_second < a_second * PERIOD_S
        }
