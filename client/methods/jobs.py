"""Jobs: submitting measurements, following and awaiting them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.requests.requests import ProfilingOptions
from ...core.service.jobs import JobList, JobState, JobView
from ..errors import error_from_job
from ..job_events import EventStream, dispatch_events, follow_events
from ..model_sources import ModelLike, describe_model
from ..progress import Progress, show_progress
from ..request_builders import build_create, build_get, drop_none
from ..retry import ask
from ..sans_io import HttpRequest, Steps


def profile_job(
    model: ModelLike,
    sample: Any = None,
    *,
    profiling: ProfilingOptions | Mapping[str, Any] | None = None,
    device_kind: str | None = None,
    fresh: bool = False,
) -> Steps[JobView]:
    """Submit a measurement and return its job at once; see `wait`.

    Args:
        model: As for `plan`, except profiles.
        sample: As for `plan`.
        profiling: Measurement settings.
        device_kind: Required kind of GPU, such as ``H200``.
        fresh: Measure again even if the service has a profile of this model.
    """
    source = describe_model(model, sample)
    options = drop_none(profiling=profiling, device_kind=device_kind)
    call = build_create("profile-jobs", fields={**source, **options}, fresh=fresh)
    return (yield from ask(call, JobView))


def job(job_id: str) -> Steps[JobView]:
    """Return a job with its current state."""
    return (yield from ask(build_get("jobs", job_id), JobView))


def jobs(
    *, state: JobState | None = None, limit: int | None = None, cursor: str | None = None
) -> Steps[JobList]:
    """List jobs, newest first."""
    return (yield from ask(build_get("jobs", state=state, limit=limit, cursor=cursor), JobList))


def cancel(job: str | JobView) -> Steps[JobView]:
    """Cancel a job; a finished one stays as it is."""
    call = HttpRequest("POST", f"{build_get('jobs', job_id_of(job)).path}/cancel")
    return (yield from ask(call, JobView))


def events(job: str | JobView, *, after: int = 0) -> EventStream:
    """Yield a job's events as they happen, until it finishes.

    Broken connections are resumed; every event is yielded exactly once.

    Args:
        job: The job or its id.
        after: Number of the last event already seen.
    """
    yield from follow_events(job_id_of(job), after)


def wait(
    job: str | JobView, *, timeout_s: float | None = None, progress: Progress = True
) -> Steps[JobView]:
    """Wait for a job to succeed and return it with its result.

    Args:
        job: The job or its id.
        timeout_s: Longest time to wait; `None` for no limit.
        progress: Draw a progress bar (on stderr, if that is a terminal), or a callback for events.

    Raises:
        DeadlineExceeded: The job is still running after ``timeout_s``, or missed its own deadline.
        Cancelled: The job was cancelled.
        OutOfMemory, MeasurementError, StagewrightError: The job failed.
    """
    found = job if isinstance(job, JobView) else None
    if found is None or not found.is_finished:
        with show_progress(progress) as show:
            yield from dispatch_events(follow_events(job_id_of(job), limit_s=timeout_s), show)
        found = yield from ask(build_get("jobs", job_id_of(job)), JobView)
    if found.state != "succeeded":
        raise error_from_job(found)
    return found


def job_id_of(job: str | JobView) -> str:
    return job if isinstance(job, str) else job.id
