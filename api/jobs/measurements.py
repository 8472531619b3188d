"""Measuring for a job, on its worker: the child, progress, signs of life, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import (
    Cancelled,
    CaptureError,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
    StagewrightError,
)
from ...core.requests.requests import MeasureRequest
from ..model_sources.estimator import estimate_confined
from ..model_sources.measure import MeasuringSetup, measure_confined
from .messages import (
    Heartbeat,
    ModelEstimated,
    ProfileMeasured,
    TaskFailed,
    TaskOutcome,
    WorkerLost,
    WorkerProgress,
    WorkerTask,
)

BEAT_S = 2.0
"""How often a worker says that it is alive."""

STOP_S = 0.2
"""How often it asks whether to stop; a child ends that late."""

ERRORS: dict[str, type[StagewrightError]] = {
    error.__name__: error
    for error in (InvalidInput, CaptureError, MeasurementError, OutOfMemory, DeadlineExceeded)
}
"""Errors that are addressed to whoever asked."""


def measure(
    task: WorkerTask,
    tell: Callable[[Heartbeat | WorkerProgress], None],
    is_stopped: Callable[[], bool],
) -> TaskOutcome:
    """Measure, or estimate, in a child of this thread's; blocks until its processes are dead.

    Args:
        task: What to measure.
        tell: Called with progress and, every `BEAT_S`, a sign of life; from other threads too.
        is_stopped: Asked now and then; the child ends once it says so.
    """

    def on_progress(told: dict[str, Any]) -> None:
        tell(WorkerProgress(told["done"], told["total"], told["layer"]))

    try:
        with _watched(lambda: tell(Heartbeat()), is_stopped) as stopped:
            if task.is_estimate:
                return ModelEstimated(_estimated(task, stopped))
            request = MeasureRequest.model_validate_json(task.request_json)
            setup = task.setup or read_own_setup()
            profile = measure_confined(request, setup, on_progress=on_progress, stopped=stopped)
    except Cancelled:
        return WorkerLost("it was stopped")
    except OSError as error:
        return WorkerLost(f"its process could not be started: {error}")
    except StagewrightError as error:
        return failed(error)
    return ProfileMeasured(profile.to_json())


def _estimated(task: WorkerTask, stopped: threading.Event) -> str:
    """The child's answer; estimates are made by workers elsewhere alone, which know how."""
    from ..settings.load import configure

    return estimate_confined(task.request_json, configure({}).settings, stopped)


def read_own_setup() -> MeasuringSetup:
    """How this machine measures for servers elsewhere, by its own ``STAGEWRIGHT_*`` variables.

    Raises:
        InvalidInput: One of them does not fit.
    """
    from ..settings.load import configure

    return MeasuringSetup.from_settings(configure({}).settings)


def failed(error: StagewrightError) -> TaskFailed:
    """An error as what a worker sends."""
    name = next((name for name in reversed(ERRORS) if isinstance(error, ERRORS[name])), "")
    return TaskFailed(
        error=name,
        message=str(error),
        field=getattr(error, "field", None),
        layer=getattr(error, "layer", None),
        required_bytes=getattr(error, "required_bytes", None),
        available_bytes=getattr(error, "available_bytes", None),
    )


def error_of(told: TaskFailed) -> StagewrightError | None:
    """And back; `None` for a fault of ours, whose message is not for the caller."""
    error_class = ERRORS.get(told.error)
    if error_class is InvalidInput:
        return InvalidInput(told.message, field=told.field)
    if error_class is OutOfMemory:
        return OutOfMemory(
            told.message,
            layer=told.layer,
            required_bytes=told.required_bytes,
            available_bytes=told.available_bytes,
        )
    return None if error_class is None else error_class(told.message)


@contextmanager
def _watched(beat: Callable[[], None], is_stopped: Callable[[], bool]) -> Iterator[threading.Event]:
    """An event that is set once the work has to stop; beats meanwhile."""
    stopped, done = threading.Event(), threading.Event()

    def watch() -> None:
        num_asked = 0
        while not done.wait(STOP_S):
            if is_stopped():
                stopped.set()
                return
            num_asked += 1
            if num_asked % round(BEAT_S / STOP_S) == 0:
                beat()

    watcher = threading.Thread(target=watch, name="job-watch", daemon=True)
    watcher.start()
    try:
        yield stopped
    finally:
        done.set()
        watcher.join()
