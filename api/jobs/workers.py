"""Contract of worker backends, which run tasks outside the server's event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .messages import WorkerMessage, WorkerTask


class WorkerBackend(Protocol):
    """Workers that each run one task at a time; methods may block and be called from any thread."""

    def submit(self, task: WorkerTask, on_message: Callable[[WorkerMessage], None]) -> None:
        """Queue a task.

        Args:
            task: The task to run.
            on_message: Called from any thread, in order: `WorkerStarted` once, any number of
                `Heartbeat` and `WorkerProgress`, and finally a `TaskOutcome`.

        Raises:
            WorkersUnavailable: The task was not queued.
        """

    def stop(self, key: str) -> None:
        """End a task and its processes, or never begin it; unknown keys are ignored."""

    def offers(self) -> Mapping[str, int]:
        """Return the number of workers offering each resource. Raises: WorkersUnavailable."""

    def invitation(self, needs: str) -> str:
        """Return the command that would add a worker offering a resource."""

    def close(self) -> None:
        """Stop every task and release everything; closing twice is allowed."""
