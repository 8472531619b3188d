"""How long a client goes on asking."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 8.0


@dataclass(frozen=True)
class Patience:
    """How long one call may take, attempts and pauses together.

    Attributes:
        timeout_s: In seconds.
        clock: Seconds that never go back.
        jitter: From 0 up to 1: clients that failed together should not return together.
        address: Who is asked, for messages.
        on_wait: Told once for each call that its service does not answer and is waited for.
    """

    timeout_s: float
    clock: Callable[[], float]
    jitter: Callable[[], float] = random.random
    address: str = ""
    on_wait: Callable[[str], None] | None = None

    def delay_s(self, attempt: int) -> float:
        """How long to wait after a number of attempts: doubling, at least half of it."""
        longest: float = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(attempt - 1, 10))
        return longest * (0.5 + 0.5 * self.jitter())
