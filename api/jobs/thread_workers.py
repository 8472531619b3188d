"""Jobs run from threads of the server's own, where Dask is not wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from .measurements import measure
from .messages import CPU, WorkerMessage, WorkerStarted, WorkerTask

NAME = "this-server"


class ThreadWorkers:
    """`workers.Workers`, in threads; each measurement still has a process of its own.

    Args:
        count: How many run at once; timings taken side by side disturb each other.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, "job")
        self._stopped: dict[str, threading.Event] = {}

    def submit(self, task: WorkerTask, tell: Callable[[WorkerMessage], None]) -> None:
        stopped = self._stopped.setdefault(task.key, threading.Event())
        if task.needs == CPU:  # another stays in the queue: nobody here can run it
            self._pool.submit(self._run, task, tell, stopped)

    def stop(self, key: str) -> None:
        stopped = self._stopped.pop(key, None)
        if stopped is not None:
            stopped.set()

    def offers(self) -> Mapping[str, int]:
        return {CPU: self._count}

    def invitation(self, needs: str) -> str:
        return (
            "start the server with --scheduler tls://HOST:8786, and where there is one: "
            f"stagewright worker --scheduler tls://HOST:8786 --resources {needs}=1"
        )

    def close(self) -> None:
        for key in list(self._stopped):
            self.stop(key)
        self._pool.shutdown()

    def _run(
        self, task: WorkerTask, tell: Callable[[WorkerMessage], None], stopped: threading.Event
    ) -> None:
        if stopped.is_set():
            return
        tell(WorkerStarted(NAME))
        outcome = measure(task, tell, stopped.is_set)
        self._stopped.pop(task.key, None)
        tell(outcome)
