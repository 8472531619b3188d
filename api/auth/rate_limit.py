"""Rate limit: a token bucket for each API key.

A bucket holds a minute's worth of requests and refills steadily. A pause therefore allows a burst,
and no minute has more than twice the quota.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

PERIOD_S = 60.0
MAX_BUCKETS = 10_000
"""Beyond this, full buckets are dropped: a new one starts full as well."""


@dataclass(frozen=True)
class RateStatus:
    """State of a bucket after one request.

    Attributes:
        quota: Requests a minute.
        remaining: Whole requests left now.
        wait_s: Time until there is one more; 0 if there is one.
        is_exceeded: True if this request was one too many.
    """

    quota: int
    remaining: int
    wait_s: int
    is_exceeded: bool


class RateLimiter:
    """Thread-safe counter of requests by key, in this process alone."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # By key: tokens left, when they were counted, tokens gained a second.
        self._buckets: dict[str, tuple[float, float, float]] = {}
        self._lock = Lock()

    def take(self, key: str, quota: int) -> RateStatus:
        """Count one request of a key that may send ``quota`` a minute."""
        with self._lock:
            now, per_second = self._now(), quota / PERIOD_S
            tokens, before, _ = self._buckets.get(key, (float(quota), now, per_second))
            tokens = min(quota, tokens + (now - before) * per_second)
            is_exceeded = tokens < 1
            if not is_exceeded:
                tokens -= 1
            if key not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
                self._drop_full_buckets(now)
            self._buckets[key] = (tokens, now, per_second)
        wait_s = 0 if tokens >= 1 else math.ceil((1 - tokens) * PERIOD_S / quota)
        return RateStatus(quota, int(tokens), wait_s, is_exceeded)

    def _drop_full_buckets(self, now: float) -> None:
        self._buckets = {
            key: (tokens, before, per_second)
            for key, (tokens, before, per_second) in self._buckets.items()
            if tokens + (now - before) * per_second < per_second * PERIOD_S
        }
