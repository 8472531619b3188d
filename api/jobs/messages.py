"""Messages between server and workers: plain data, equal on both sides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from ...core.errors import DeadlineExceeded, ErrorRecord
from ..sandbox.child_messages import CHILD_ERRORS

CPU = "cpu"
"""Resource offered by every worker that has torch, unless configured otherwise."""

CUDA = "cuda"
"""Resource offered by every worker with a GPU, besides the GPU's own name."""


@dataclass(frozen=True)
class WorkerTask:
    """One measurement for one job, or one estimate.

    Attributes:
        key: Unique among all tasks of all jobs.
        request_json: A `MeasureRequest`, or an `EstimateRequest` for an estimate.
        needs: The resource a worker must offer.
        setup: How to measure (`model_sources.measure.MeasuringSetup`); `None` leaves it to the
            worker's own settings.
    """

    key: str
    request_json: str
    needs: str
    setup: Any = None
    is_estimate: bool = False


@dataclass(frozen=True)
class WorkerStarted:
    """A worker has begun the task."""

    worker: str


@dataclass(frozen=True)
class Heartbeat:
    """The worker is alive and still at the task."""


@dataclass(frozen=True)
class WorkerProgress:
    """Progress of the task."""

    done: int
    total: int
    layer: str


@dataclass(frozen=True)
class ProfileMeasured:
    """The measurement is finished and all its processes have ended."""

    profile_json: str


@dataclass(frozen=True)
class ModelEstimated:
    """The estimate (an `Estimated`) is finished."""

    estimated_json: str


@dataclass(frozen=True)
class TaskFailed:
    """The task cannot succeed; retrying would not help.

    An error of other classes than `ERRORS` is an internal one of the worker.
    """

    error: ErrorRecord


@dataclass(frozen=True)
class WorkerLost:
    """The worker died or was never reached; a retry may succeed."""

    why: str


TaskReport = WorkerStarted | Heartbeat | WorkerProgress
TaskOutcome = ProfileMeasured | ModelEstimated | TaskFailed | WorkerLost
WorkerMessage = TaskReport | TaskOutcome

REPORTS: dict[str, type[TaskReport]] = {
    "started": WorkerStarted,
    "alive": Heartbeat,
    "progress": WorkerProgress,
}
"""Messages of a worker at its task, by their kinds as Dask events."""

ERRORS = (*CHILD_ERRORS, DeadlineExceeded)
"""Errors whose message is meant for the client."""


def as_event(report: TaskReport) -> dict[str, Any]:
    """Return a report as a Dask event, which may hold builtin types only."""
    kind = next(kind for kind, report_class in REPORTS.items() if type(report) is report_class)
    return {"kind": kind, **asdict(report)}


def from_event(event: dict[str, Any]) -> TaskReport:
    """Return the report in a Dask event. Raises: KeyError, ValueError."""
    return TypeAdapter[TaskReport](REPORTS[event["kind"]]).validate_python(event)
