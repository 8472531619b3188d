"""Worker backends, which run tasks outside the server's event loop: contract, threads, choice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ..model_sources.measure import MeasuringSetup
from ..settings.settings import ServerSettings
from .dask_workers import DaskWorkers, EmbeddedScheduler, RemoteScheduler
from .measurements import run_measurement
from .messages import CPU, WorkerMessage, WorkerStarted, WorkerTask
from .worker_resources import INVITATION

EMBEDDED, THREADS = "embedded", "threads"
NAME = "this-server"


class WorkerBackend(Protocol):
    """Workers that each run one task at a time; methods may block and be called from any thread."""

    def submit(self, task: WorkerTask, on_message: Callable[[WorkerMessage], None]) -> None:
        """Queue a task. Raises: WorkersUnavailable.

        ``on_message`` is called from any thread, in order: with `WorkerStarted` once, any number of
        `Heartbeat` and `WorkerProgress`, and finally a `TaskOutcome`.
        """

    def stop(self, key: str) -> None:
        """End a task and its processes, or never begin it; unknown keys are ignored."""

    def offers(self) -> Mapping[str, int]:
        """Return the number of workers offering each resource. Raises: WorkersUnavailable."""

    def invitation(self, needs: str) -> str:
        """Return the command that would add a worker offering a resource."""

    def close(self) -> None:
        """Stop every task and release everything; closing twice is allowed."""


class ThreadWorkers:
    """A `WorkerBackend` of threads; each measurement still has a child process of its own.

    With a ``count`` above 1, timings measured side by side disturb each other.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, "job")
        self._stopped: dict[str, threading.Event] = {}

    def submit(self, task: WorkerTask, on_message: Callable[[WorkerMessage], None]) -> None:
        stopped = self._stopped.setdefault(task.key, threading.Event())
        if task.needs == CPU:  # a task for a GPU stays queued: no thread can run it
            self._pool.submit(self._run, task, on_message, stopped)

    def stop(self, key: str) -> None:
        stopped = self._stopped.pop(key, None)
        if stopped is not None:
            stopped.set()

    def offers(self) -> Mapping[str, int]:
        return {CPU: self._count}

    def invitation(self, needs: str) -> str:
        return INVITATION.format(needs=needs)

    def close(self) -> None:
        for key in list(self._stopped):
            self.stop(key)
        self._pool.shutdown()

    def _run(
        self,
        task: WorkerTask,
        on_message: Callable[[WorkerMessage], None],
        stopped: threading.Event,
    ) -> None:
        if stopped.is_set():
            return
        on_message(WorkerStarted(NAME))
        outcome = run_measurement(task, on_message, stopped.is_set)
        self._stopped.pop(task.key, None)
        on_message(outcome)


def build_workers(settings: ServerSettings) -> WorkerBackend:
    """Return the backend of the settings; nothing is started before the first job."""
    if settings.scheduler == THREADS:
        return ThreadWorkers()
    if settings.scheduler == EMBEDDED:
        return DaskWorkers(EmbeddedScheduler(settings.log_format, settings.log_level))
    return DaskWorkers(RemoteScheduler(settings.scheduler, settings.scheduler_tls))


def is_local(scheduler: str) -> bool:
    """Return True if jobs run on the server's machine."""
    return scheduler in (EMBEDDED, THREADS)


def local_setup(settings: ServerSettings) -> MeasuringSetup | None:
    """Return how local workers measure; `None` for remote ones, which have their own settings."""
    return MeasuringSetup.from_settings(settings) if is_local(settings.scheduler) else None
