"""Worker backend on Dask: one worker on this machine, or all workers of a remote scheduler."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from distributed import get_worker

from ..errors import WorkersUnavailable
from .dask_scheduler import EmbeddedScheduler, RemoteScheduler
from .measurements import run_measurement
from .messages import (
    TaskOutcome,
    TaskReport,
    WorkerLost,
    WorkerMessage,
    WorkerStarted,
    WorkerTask,
    as_event,
    from_event,
)

CONNECT_TIMEOUT = "10s"

_log = logging.getLogger(__name__)


class DaskWorkers:
    """A `WorkerBackend` behind a Dask scheduler, connected when first needed.

    Workers' messages travel as events of a topic that belongs to this server; the outcome is the
    result of the Dask task. Workers never see the database.
    """

    def __init__(self, scheduler: EmbeddedScheduler | RemoteScheduler) -> None:
        self._scheduler = scheduler
        self._topic = f"stagewright-{secrets.token_hex(8)}"
        self._lock = threading.Lock()  # guards the connection; callbacks do not take it
        self._closed = False
        self._client: Any = None
        self._futures: dict[str, Any] = {}
        self._callbacks: dict[str, Callable[[WorkerMessage], None]] = {}

    def submit(self, task: WorkerTask, on_message: Callable[[WorkerMessage], None]) -> None:
        client = self._connected()
        self._callbacks[task.key] = on_message  # first: a message may arrive before the future
        try:
            future = client.submit(
                run_task,
                task,
                self._topic,
                key=task.key,
                resources={task.needs: 1},
                # Dask gives equal pure calls one result.
                pure=False,
                retries=0,
            )
        except Exception as error:
            self._callbacks.pop(task.key, None)
            raise WorkersUnavailable(f"{self._scheduler.name} took no task: {error}") from error
        self._futures[task.key] = future
        future.add_done_callback(self._on_done)

    def stop(self, key: str) -> None:
        self._callbacks.pop(key, None)
        future = self._futures.pop(key, None)
        if future is not None:
            with suppress(Exception):  # a scheduler that is gone runs nothing
                future.cancel(force=True)

    def offers(self) -> Mapping[str, int]:
        client = self._connected()
        try:
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
        except Exception as error:
            raise WorkersUnavailable(f"{self._scheduler.name} does not answer: {error}") from error
        return Counter(kind for worker in workers for kind in worker.get("resources", {}))

    def invitation(self, needs: str) -> str:
        return self._scheduler.invitation.format(needs=needs)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for key in list(self._futures):
                self.stop(key)
            self._disconnect()

    def _connected(self) -> Any:
        """Return the client, reconnected if the scheduler was lost. Raises: WorkersUnavailable."""
        with self._lock:
            if self._closed:
                raise WorkersUnavailable("the server is stopping")
            if self._client is not None and self._client.status == "running":
                return self._client
            self._disconnect()
            self._client = self._scheduler.connect(CONNECT_TIMEOUT)
            self._client.subscribe_topic(self._topic, self._on_event)
            return self._client

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                client.close(timeout=2)
        self._scheduler.close()
        for key in list(self._futures):
            self._futures.pop(key, None)
            self._end(key, WorkerLost(f"{self._scheduler.name} is gone"))

    def _on_event(self, event: tuple[float, Any]) -> None:
        """Pass a worker's message on; called on the client's own thread."""
        payload = event[1]
        try:
            on_message = self._callbacks.get(payload["key"])
            if on_message is not None:
                on_message(from_event(payload))
        except (KeyError, ValueError, TypeError):
            _log.warning("cannot read a worker's message: %.200r", payload)

    def _on_done(self, future: Any) -> None:
        """Pass the end of a task on; called on one of the client's threads."""
        key = future.key
        # Stopped, or ended by a disconnect, which has reported it.
        if self._futures.pop(key, None) is None:
            return
        if future.status == "finished":
            try:
                outcome = future.result(timeout=60)
            except Exception as error:  # noqa: BLE001 - whatever happens on the way back
                self._end(key, WorkerLost(f"its result did not arrive: {type(error).__name__}"))
                return
            assert isinstance(outcome, TaskOutcome)
            self._end(key, outcome)
        elif future.status == "error":
            raised = future.exception()
            _log.warning("job task %s failed on its worker: %r", key, raised)
            self._end(key, WorkerLost(f"its worker was lost: {type(raised).__name__}"))
        else:
            self._end(key, WorkerLost(f"its task was {future.status} by {self._scheduler.name}"))

    def _end(self, key: str, outcome: TaskOutcome) -> None:
        on_message = self._callbacks.pop(key, None)
        if on_message is not None:
            on_message(outcome)


RUNNING_TASK = ("executing", "long-running")
"""States of a task on its worker in which its result is still wanted."""

CLOSING_WORKER = ("closing", "closed", "failed", "closing_gracefully")


def run_task(task: WorkerTask, topic: str) -> TaskOutcome:
    """Run a task on a Dask worker, publishing its messages under a topic.

    Dask cannot interrupt a running task. But when the task is cancelled, or the server that
    submitted it is gone, the scheduler makes the worker forget it; polling for that ends the child.
    """
    worker: Any = get_worker()

    def on_message(message: TaskReport) -> None:
        worker.log_event(topic, {"key": task.key, **as_event(message)})

    def is_stopped() -> bool:
        known = worker.state.tasks.get(task.key)
        is_wanted = known is not None and known.state in RUNNING_TASK
        return not is_wanted or worker.status.name in CLOSING_WORKER

    on_message(WorkerStarted(str(worker.name)))
    return run_measurement(task, on_message, is_stopped)
