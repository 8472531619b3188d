"""What a server gives a worker, and what it is told: plain data, the same on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CPU = "cpu"
"""What every worker offers that has torch and was not told otherwise: its own processors."""

CUDA = "cuda"
"""What every worker with a GPU offers, beside the GPU's own name."""


@dataclass(frozen=True)
class WorkerTask:
    """One measurement for one job, or an estimate.

    Attributes:
        key: Names this run; no other run of any job has it.
        request_json: The `core.options.MeasureRequest`, or `EstimateRequest`.
        needs: What the worker has to offer.
        setup: How to measure (`confined.measure.MeasuringSetup`); `None` leaves it to the worker.
        is_estimate: Whether nothing is measured; answered by `ModelEstimated`.
    """

    key: str
    request_json: str
    needs: str
    setup: Any = None
    is_estimate: bool = False


@dataclass(frozen=True)
class WorkerStarted:
    """A worker has begun."""

    worker: str


@dataclass(frozen=True)
class Heartbeat:
    """It is still at it."""


@dataclass(frozen=True)
class WorkerProgress:
    """It has got so far."""

    done: int
    total: int
    layer: str


@dataclass(frozen=True)
class ProfileMeasured:
    """It is done, and nothing it started is left."""

    profile_json: str


@dataclass(frozen=True)
class ModelEstimated:
    """It is done: a `core.options.Estimated`."""

    estimated_json: str


@dataclass(frozen=True)
class TaskFailed:
    """It cannot be measured; trying again would not help.

    Attributes:
        error: Name of the class in `core.errors`.
        message: For the caller.
        field: JSON pointer into the request, if one field is at fault.
        layer: Where memory ran out, if it did.
        required_bytes: What was needed there.
        available_bytes: What there is.
    """

    error: str
    message: str
    field: str | None = None
    layer: str | None = None
    required_bytes: int | None = None
    available_bytes: int | None = None


@dataclass(frozen=True)
class WorkerLost:
    """The worker died or was never reached; whatever it did is gone."""

    why: str


TaskOutcome = ProfileMeasured | ModelEstimated | TaskFailed | WorkerLost
WorkerMessage = WorkerStarted | Heartbeat | WorkerProgress | TaskOutcome
