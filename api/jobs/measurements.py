"""Tasks run on a worker: the child process, its heartbeat and its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import Cancelled, StagewrightError
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


def run_measurement(
    task: WorkerTask,
    on_message: Callable[[Heartbeat | WorkerProgress], None],
    is_stopped: Callable[[], bool],
) -> TaskOutcome:
    """Measure or estimate in a child of this thread; return once its processes are killed.

    ``on_message`` is called from other threads too; ``is_stopped`` is polled, and ends the child.
    """

    def on_progress(progress: dict[str, Any]) -> None:
        on_message(WorkerProgress(progress["done"], progress["total"], progress["layer"]))

    try:
        with _watch(lambda: on_message(Heartbeat()), is_stopped) as stopped:
            if task.is_estimate:
                from ..settings.load import configure

                own = configure({}).settings
                return ModelEstimated(estimate_confined(task.request_json, own, stopped))
            request = MeasureRequest.model_validate_json(task.request_json)
            setup = task.setup or read_own_setup()
            profile = measure_confined(request, setup, on_progress=on_progress, stopped=stopped)
    except Cancelled:
        return WorkerLost("it was stopped")
    except OSError as error:
        return WorkerLost(f"its process could not be started: {error}")
    except StagewrightError as error:
        return TaskFailed(error.to_record())
    return ProfileMeasured(profile.to_json())


def read_own_setup() -> MeasuringSetup:
    """Return how this machine measures for remote servers, by its ``STAGEWRIGHT_*`` variables.

    Raises: InvalidInput.
    """
    from ..settings.load import configure

    return MeasuringSetup.from_settings(configure({}).settings)


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
