"""Waking whoever waits for a job of this server to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class JobWatcher:
    """Sees every change of a job from its beginning to its end, unless other servers make it."""

    def __init__(self, board: JobNotifications) -> None:
        self._board = board
        self.event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until something has happened since the last call, the time is over, or all stops."""
        if timeout_s > 0 and not self._board.is_stopped:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.event.wait(), timeout_s)
        self.event.clear()


class JobNotifications:
    """Who waits for what; belongs to one event loop."""

    def __init__(self) -> None:
        self._watches: dict[str, set[JobWatcher]] = {}
        self.is_stopped = False

    @contextmanager
    def watch(self, job_id: str) -> Iterator[JobWatcher]:
        """Begin before the job is looked at, so that no change falls in between."""
        watch, watches = JobWatcher(self), self._watches.setdefault(job_id, set())
        watches.add(watch)
        try:
            yield watch
        finally:
            watches.discard(watch)
            if not watches and self._watches.get(job_id) is watches:
                del self._watches[job_id]

    def changed(self, job_id: str) -> None:
        """Something happened to a job."""
        for watch in self._watches.get(job_id, ()):
            watch.event.set()

    def stop(self) -> None:
        """Wake everybody, and let nobody wait any more."""
        self.is_stopped = True
        for job_id in self._watches:
            self.changed(job_id)
