"""What runs jobs, as a contract: somewhere else, one at a time on each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .messages import WorkerMessage, WorkerTask


class WorkerBackend(Protocol):
    """Runs tasks. Every method may block and may be called from any thread."""

    def submit(self, task: WorkerTask, tell: Callable[[WorkerMessage], None]) -> None:
        """Queue a task.

        Args:
            task: What to run.
            tell: Called from any thread with messages in order: `WorkerStarted` once, any number
                of `Heartbeat` and `WorkerProgress`, and in the end `Ended` or `WorkerLost`.

        Raises:
            WorkersUnavailable: It was not queued.
        """

    def stop(self, key: str) -> None:
        """End a task and its processes, or never begin it. It need not be known."""

    def offers(self) -> Mapping[str, int]:
        """What workers offer, and on how many of them.

        Raises:
            WorkersUnavailable: Nobody knows.
        """

    def invitation(self, needs: str) -> str:
        """How to add a worker that offers something, for a person to read."""

    def close(self) -> None:
        """Stop every task and release everything; closing twice changes nothing."""
