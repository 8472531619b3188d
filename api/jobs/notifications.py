"""Notification of coroutines that wait for a job of this server to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class JobWatcher:
    """Observer of one job; changes made by other servers are not seen."""

    def __init__(self, notifications: JobNotifications) -> None:
        self._notifications = notifications
        self.event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the first change since the last call, on timeout, or at shutdown."""
        if timeout_s > 0 and not self._notifications.is_stopped:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.event.wait(), timeout_s)
        self.event.clear()


class JobNotifications:
    """Registry of the watchers of each job; belongs to one event loop."""

    def __init__(self) -> None:
        self._watchers: dict[str, set[JobWatcher]] = {}
        self.is_stopped = False

    @contextmanager
    def watch(self, job_id: str) -> Iterator[JobWatcher]:
        """Yield a watcher; enter before reading the job, so that no change is missed."""
        watcher, watchers = JobWatcher(self), self._watchers.setdefault(job_id, set())
        watchers.add(watcher)
        try:
            yield watcher
        finally:
            watchers.discard(watcher)
            if not watchers:
                self._watchers.pop(job_id, None)

    def changed(self, job_id: str) -> None:
        """Wake the watchers of a job."""
        for watcher in self._watchers.get(job_id, ()):
            watcher.event.set()

    def stop(self) -> None:
        """Wake all watchers; none waits any more."""
        self.is_stopped = True
        for job_id in self._watchers:
            self.changed(job_id)
