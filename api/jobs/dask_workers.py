"""Jobs run by Dask workers: one on this machine, or all that a scheduler has."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import WorkersUnavailable
from .dask_scheduler import Scheduler
from .measurements import measure
from .messages import (
    Heartbeat,
    TaskOutcome,
    WorkerLost,
    WorkerMessage,
    WorkerProgress,
    WorkerStarted,
    WorkerTask,
)

CONNECT_TIMEOUT = "10s"

_log = logging.getLogger(__name__)


class DaskWorkers:
    """`workers.Workers` behind a Dask scheduler, reached when there is something to do.

    What workers say on the way comes as events of a topic of this server's own; the result is
    that of the task. A worker never sees the database.

    Args:
        scheduler: Whose workers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._topic = f"stagewright-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._closed = False
        self._client: Any = None
        self._futures: dict[str, Any] = {}
        self._tell: dict[str, Callable[[WorkerMessage], None]] = {}

    def submit(self, task: WorkerTask, tell: Callable[[WorkerMessage], None]) -> None:
        client = self._connected()
        self._tell[task.key] = tell
        try:
            future = client.submit(
                run_task,
                task,
                self._topic,
                key=task.key,
                resources={task.needs: 1},
                pure=False,
                retries=0,
            )
        except Exception as error:
            self._tell.pop(task.key, None)
            raise WorkersUnavailable(f"{self._scheduler.name} took no task: {error}") from error
        self._futures[task.key] = future
        future.add_done_callback(self._done)

    def stop(self, key: str) -> None:
        self._tell.pop(key, None)
        future = self._futures.pop(key, None)
        if future is not None:
            with suppress(Exception):  # a scheduler that is gone runs nothing
                future.cancel(force=True)

    def offers(self) -> Mapping[str, int]:
        client = self._connected()
        try:
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
        except Exception as error:
            raise WorkersUnavailable(f"{self._scheduler.name} says nothing: {error}") from error
        return Counter(kind for worker in workers for kind in worker.get("resources", {}))

    def invitation(self, needs: str) -> str:
        return self._scheduler.invitation(needs)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for key in list(self._futures):
                self.stop(key)
            self._disconnect()

    def _connected(self) -> Any:
        """The client, connected again if the scheduler had gone.

        Raises:
            WorkersUnavailable: There is no scheduler to be reached.
        """
        with self._lock:
            if self._closed:
                raise WorkersUnavailable("the server is stopping")
            if self._client is not None and self._client.status == "running":
                return self._client
            self._disconnect()
            self._client = self._scheduler.connect(CONNECT_TIMEOUT)
            self._client.subscribe_topic(self._topic, self._hear)
            return self._client

    def _disconnect(self) -> None:
        lost, self._client = self._client, None
        if lost is not None:
            with suppress(Exception):
                lost.close(timeout=2)
        self._scheduler.close()
        for key in list(self._futures):
            self._futures.pop(key, None)
            self._told(key, WorkerLost(f"{self._scheduler.name} is gone"))

    def _hear(self, event: tuple[float, Any]) -> None:
        """A message of a worker, on the client's own thread."""
        said = event[1]
        try:
            tell = self._tell.get(said["key"])
            if tell is not None:
                tell(from_event(said))
        except (KeyError, ValueError, TypeError):
            _log.warning("a worker said what this server does not understand: %.200r", said)

    def _done(self, future: Any) -> None:
        """The end of a task, on a thread of the client's."""
        key = future.key
        if self._futures.pop(key, None) is None:
            return
        if future.status == "finished":
            try:
                outcome = future.result(timeout=60)
            except Exception as error:  # noqa: BLE001 - whatever happens on the way back
                self._told(key, WorkerLost(f"its result did not arrive: {type(error).__name__}"))
                return
            assert isinstance(outcome, TaskOutcome)
            self._told(key, outcome)
        elif future.status == "error":
            raised = future.exception()
            _log.warning("job task %s failed on its worker: %r", key, raised)
            self._told(key, WorkerLost(f"its worker was lost: {type(raised).__name__}"))
        else:
            self._told(key, WorkerLost(f"its task was {future.status} by {self._scheduler.name}"))

    def _told(self, key: str, told: WorkerMessage) -> None:
        tell = self._tell.pop(key, None)
        if tell is not None:
            tell(told)


RUNNING_TASK = ("executing", "long-running")
"""States of a task on its worker in which somebody still waits for it."""

CLOSING_WORKER = ("closing", "closed", "failed", "closing_gracefully")


def run_task(task: WorkerTask, topic: str) -> TaskOutcome:
    """Measure, telling the scheduler's topic what happens meanwhile.

    Dask cannot interrupt a task. But when it is cancelled, or the server that asked for it is
    gone, the scheduler has its worker forget it; that is seen here, and ends the child.
    """
    from distributed import get_worker

    worker: Any = get_worker()

    def tell(happened: WorkerStarted | Heartbeat | WorkerProgress) -> None:
        worker.log_event(topic, {"key": task.key, **as_event(happened)})

    def is_stopped() -> bool:
        known = worker.state.tasks.get(task.key)
        wanted = known is not None and known.state in RUNNING_TASK
        return not wanted or worker.status.name in CLOSING_WORKER

    tell(WorkerStarted(str(worker.name)))
    return measure(task, tell, is_stopped)


def as_event(happened: WorkerStarted | Heartbeat | WorkerProgress) -> dict[str, Any]:
    """A message as Dask sends it: builtin types alone."""
    match happened:
        case WorkerStarted(worker):
            return {"kind": "started", "worker": worker}
        case WorkerProgress(done, total, layer):
            return {"kind": "progress", "done": done, "total": total, "layer": layer}
    return {"kind": "alive"}


def from_event(event: dict[str, Any]) -> WorkerStarted | Heartbeat | WorkerProgress:
    """And back.

    Raises:
        KeyError, ValueError, TypeError: It is none of ours.
    """
    match event["kind"]:
        case "started":
            return WorkerStarted(str(event["worker"]))
        case "progress":
            return WorkerProgress(int(event["done"]), int(event["total"]), str(event["layer"]))
        case "alive":
            return Heartbeat()
    raise ValueError(event["kind"])
