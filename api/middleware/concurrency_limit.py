"""Concurrency limit: the number of requests handled at once; the others wait in order of arrival.

Without it, every step of a request queues behind the steps of all others, so that a new plan, which
takes eight steps, waits eight times as long as a list, which takes one. With it each request waits
once. The figures of docs/load.md (217 requests a second from 200 clients without pauses, 99 of 100
within 1.3 s) were measured with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

AT_ONCE = 16
"""Four times the threads for the database: some requests search, some write."""

MAX_SLOT_S = 0.25
"""Longest a request keeps its slot; one that searches or measures continues without."""


class ConcurrencyLimit:
    """First-in, first-out slots for requests.

    Args:
        at_once: Number of slots.
        max_slot_s: Longest one is held.
    """

    def __init__(self, at_once: int = AT_ONCE, max_slot_s: float = MAX_SLOT_S) -> None:
        self._max_slot_s = max_slot_s
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot; the function given releases it early, as do `max_slot_s` seconds."""
        await self._free.acquire()
        is_held = True

        def release() -> None:
            # Called up to three times: by the timer, by a stream's first byte, at the end.
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._max_slot_s, release)
        try:
            yield release
        finally:
            timer.cancel()
            release()
