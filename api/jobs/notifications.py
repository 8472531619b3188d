"""Notification of coroutines that wait for a job of this server to change."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress


class JobNotifications:
    """Registry of who waits for each job; belongs to one event loop.

    Changes made by other servers are not seen.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.is_stopped = False

    @contextmanager
    def watch(self, job_id: str) -> Iterator[Callable[[float], Awaitable[None]]]:
        """Yield a function that waits for a change; enter before reading the job.

        It returns at the first change since its last call, on its timeout in seconds, or at
        shutdown.
        """
        event = asyncio.Event()

        async def wait(timeout_s: float) -> None:
            if timeout_s > 0 and not self.is_stopped:
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), timeout_s)
            event.clear()

        self._waiting[job_id].add(event)
        try:
            yield wait
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def changed(self, job_id: str) -> None:
        """Wake all callers that wait for a job."""
        for event in self._waiting.get(job_id, ()):
            event.set()

    def stop(self) -> None:
        """Wake all waiting callers; later calls return at once."""
        self.is_stopped = True
        for job_id in self._waiting:
            self.changed(job_id)
