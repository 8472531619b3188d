"""Tasks run on a worker: the child process, its heartbeat and its outcome."""

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

HEARTBEAT_S = 2.0
POLL_STOP_S = 0.2
"""Interval at which a worker asks whether to stop, and so the delay until its child ends."""

ERRORS: dict[str, type[StagewrightError]] = {
    error.__name__: error
    for error in (InvalidInput, CaptureError, MeasurementError, OutOfMemory, DeadlineExceeded)
}
"""Errors whose message is meant for the client."""

DETAILS = ("field", "layer", "required_bytes", "available_bytes")
"""Attributes that some of these errors have besides their message."""


def run_measurement(
    task: WorkerTask,
    on_message: Callable[[Heartbeat | WorkerProgress], None],
    is_stopped: Callable[[], bool],
) -> TaskOutcome:
    """Measure or estimate in a child of this thread; return once its processes are killed.

    Args:
        task: The task.
        on_message: Called with progress and heartbeats, also from other threads.
        is_stopped: Polled; the child is ended once it returns True.
    """

    def on_progress(progress: dict[str, Any]) -> None:
        on_message(WorkerProgress(progress["done"], progress["total"], progress["layer"]))

    try:
        with _watch(lambda: on_message(Heartbeat()), is_stopped) as stopped:
            if task.is_estimate:
                return ModelEstimated(_estimate(task, stopped))
            request = MeasureRequest.model_validate_json(task.request_json)
            setup = task.setup or read_own_setup()
            profile = measure_confined(request, setup, on_progress=on_progress, stopped=stopped)
    except Cancelled:
        return WorkerLost("it was stopped")
    except OSError as error:
        return WorkerLost(f"its process could not be started: {error}")
    except StagewrightError as error:
        return to_failure(error)
    return ProfileMeasured(profile.to_json())


def _estimate(task: WorkerTask, stopped: threading.Event) -> str:
    from ..settings.load import configure

    return estimate_confined(task.request_json, configure({}).settings, stopped)


def read_own_setup() -> MeasuringSetup:
    """Return how this machine measures for remote servers, by its ``STAGEWRIGHT_*`` variables.

    Raises:
        InvalidInput: A variable is invalid.
    """
    from ..settings.load import configure

    return MeasuringSetup.from_settings(configure({}).settings)


def to_failure(error: StagewrightError) -> TaskFailed:
    """Return the message that carries an error to the server."""
    # The last match is the most specific class: a subclass follows its base in ERRORS.
    name = next((name for name in reversed(ERRORS) if isinstance(error, ERRORS[name])), "")
    details = {detail: getattr(error, detail, None) for detail in DETAILS}
    return TaskFailed(error=name, message=str(error), **details)


def to_error(failure: TaskFailed) -> StagewrightError | None:
    """Return the error that a message carries; `None` for an internal error of the worker."""
    error_class = ERRORS.get(failure.error)
    if error_class is InvalidInput:
        return InvalidInput(failure.message, field=failure.field)
    if error_class is OutOfMemory:
        return OutOfMemory(
            failure.message,
            layer=failure.layer,
            required_bytes=failure.required_bytes,
            available_bytes=failure.available_bytes,
        )
    return None if error_class is None else error_class(failure.message)


@contextmanager
def _watch(beat: Callable[[], None], is_stopped: Callable[[], bool]) -> Iterator[threading.Event]:
    """Yield an event that is set once the task must stop; send heartbeats meanwhile."""
    stopped, done = threading.Event(), threading.Event()

    # A thread of its own, because the task's thread is blocked reading its child's output.
    def watch() -> None:
        num_polls = 0
        while not done.wait(POLL_STOP_S):
            if is_stopped():
                stopped.set()
                return
            num_polls += 1
            if num_polls % round(HEARTBEAT_S / POLL_STOP_S) == 0:
                beat()

    watcher = threading.Thread(target=watch, name="job-watch", daemon=True)
    watcher.start()
    try:
        yield stopped
    finally:
        done.set()
        watcher.join()
