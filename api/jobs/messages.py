"""Messages between server and workers: plain data, equal on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        is_estimate: Whether the result is a `ModelEstimated`.
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

    Attributes:
        error: Name of the class in `core.errors`.
        message: For the caller.
        field: JSON pointer into the request, if one field is at fault.
        layer: Where memory ran out, if it did.
        required_bytes: Memory needed there.
        available_bytes: Memory available.
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


TaskOutcome = ProfileMeasured | ModelEstimated | TaskFailed | WorkerLost
WorkerMessage = WorkerStarted | Heartbeat | WorkerProgress | TaskOutcome
