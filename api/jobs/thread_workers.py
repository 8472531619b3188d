"""Worker backend of threads in the server's process, for installations without Dask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from .measurements import run_measurement
from .messages import CPU, WorkerMessage, WorkerStarted, WorkerTask
from .worker_resources import INVITATION

NAME = "this-server"


class ThreadWorkers:
    """A `WorkerBackend` of threads; each measurement still has a child process of its own.

    Args:
        count: Tasks run at once; timings measured side by side disturb each other.
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
