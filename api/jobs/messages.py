"""Messages between server and workers: plain data, equal on both sides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from ...core.errors import (
    CaptureError,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
    StagewrightError,
)

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

    ``error`` names a class of `ERRORS`, whose details the other fields are; any other error is an
    internal one of the worker.
    """

    error: str
    message: str
    field: str | None = None
    layer: str | None = None
    required_bytes: int | None = None
    available_bytes: int | None = None


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

ERRORS: dict[str, type[StagewrightError]] = {
    error.__name__: error
    for error in (InvalidInput, CaptureError, MeasurementError, OutOfMemory, DeadlineExceeded)
}
"""Errors whose message is meant for the client."""

DETAILS: dict[str, tuple[str, ...]] = {
    "InvalidInput": ("field",),
    "OutOfMemory": ("layer", "required_bytes", "available_bytes"),
}
"""Attributes that some of these errors have besides their message."""


def as_event(report: TaskReport) -> dict[str, Any]:
    """Return a report as a Dask event, which may hold builtin types only."""
    kind = next(kind for kind, report_class in REPORTS.items() if type(report) is report_class)
    return {"kind": kind, **asdict(report)}


def from_event(event: dict[str, Any]) -> TaskReport:
    """Return the report in a Dask event. Raises: KeyError, ValueError."""
    return TypeAdapter[TaskReport](REPORTS[event["kind"]]).validate_python(event)


def to_failure(error: StagewrightError) -> TaskFailed:
    """Return the message that carries an error to the server."""
    # The last match is the most specific class: a subclass follows its base in ERRORS.
    name = next((name for name in reversed(ERRORS) if isinstance(error, ERRORS[name])), "")
    details = {detail: getattr(error, detail, None) for detail in DETAILS.get(name, ())}
    return TaskFailed(error=name, message=str(error), **details)


def to_error(failure: TaskFailed) -> StagewrightError | None:
    """Return the error that a message carries; `None` for an internal error of the worker."""
    error_class: Any = ERRORS.get(failure.error)
    if error_class is None:
        return None
    details = {detail: getattr(failure, detail) for detail in DETAILS.get(failure.error, ())}
    error: StagewrightError = error_class(failure.message, **details)
    return error
