"""What a Dask worker runs: one job's child, stopped when the scheduler forgets the task."""

from __future__ import annotations

from typing import Any

from .measurements import measure
from .messages import Alive, Outcome, Progressed, Started, Task

RUNNING_TASK = ("executing", "long-running")
"""States of a task on its worker in which somebody still waits for it."""

CLOSING_WORKER = ("closing", "closed", "failed", "closing_gracefully")


def run_task(task: Task, topic: str) -> Outcome:
    """Measure, telling the scheduler's topic what happens meanwhile.

    Dask cannot interrupt a task. But when it is cancelled, or the server that asked for it is
    gone, the scheduler has its worker forget it; that is seen here, and ends the child.
    """
    from distributed import get_worker

    worker: Any = get_worker()

    def tell(happened: Started | Alive | Progressed) -> None:
        worker.log_event(topic, {"key": task.key, **as_event(happened)})

    def is_stopped() -> bool:
        known = worker.state.tasks.get(task.key)
        wanted = known is not None and known.state in RUNNING_TASK
        return not wanted or worker.status.name in CLOSING_WORKER

    tell(Started(str(worker.name)))
    return measure(task, tell, is_stopped)


def as_event(happened: Started | Alive | Progressed) -> dict[str, Any]:
    """A message as Dask sends it: builtin types alone."""
    match happened:
        case Started(worker):
            return {"kind": "started", "worker": worker}
        case Progressed(done, total, layer):
            return {"kind": "progress", "done": done, "total": total, "layer": layer}
    return {"kind": "alive"}


def from_event(event: dict[str, Any]) -> Started | Alive | Progressed:
    """And back.

    Raises:
        KeyError, ValueError, TypeError: It is none of ours.
    """
    match event["kind"]:
        case "started":
            return Started(str(event["worker"]))
        case "progress":
            return Progressed(int(event["done"]), int(event["total"]), str(event["layer"]))
        case "alive":
            return Alive()
    raise ValueError(event["kind"])
