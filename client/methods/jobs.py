"""Jobs: having a model measured, and waiting for what takes long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.requests.requests import ProfilingOptions
from ...core.service.jobs import JobList, JobState, JobView
from ..errors import error_of_job
from ..job_events import Stream, each, following
from ..model_sources import ModelLike
from ..progress import Progress, watched
from ..request_builders import create, get, given
from ..retry import exchange
from ..sans_io import Call, Steps
from .documents import model_fields


def profile_job(
    model: ModelLike,
    sample: Any = None,
    *,
    profiling: ProfilingOptions | Mapping[str, Any] | None = None,
    device_kind: str | None = None,
    fresh: bool = False,
) -> Steps[JobView]:
    """Have the service measure a model; the answer is at once a job, see `wait`.

    Args:
        model: As for `plan`, but nothing that has been measured.
        sample: As for `plan`.
        profiling: How to measure, and on which sort of device.
        device_kind: The kind of GPU it has to be, such as ``H200``.
        fresh: Measure again what was measured before.
    """
    source = yield from model_fields(model, sample)
    options = given(profiling=profiling, device_kind=device_kind)
    call = create("profile-jobs", fields={**source, **options}, fresh=fresh)
    return (yield from exchange(call)).read(JobView)


def job(job_id: str) -> Steps[JobView]:
    """How a job stands.

    Raises:
        NotFound: There is none.
    """
    return (yield from exchange(get("jobs", job_id))).read(JobView)


def jobs(
    *,
    state: JobState | None = None,
    limit: int | None = None,
    cursor: str | None = None,
) -> Steps[JobList]:
    """Jobs, newest first."""
    call = get("jobs", state=state, limit=limit, cursor=cursor)
    return (yield from exchange(call)).read(JobList)


def cancel(job: str | JobView) -> Steps[JobView]:
    """Have a job stopped; one that is over stays as it is."""
    call = Call("POST", f"{get('jobs', id_of(job)).path}/cancel")
    return (yield from exchange(call)).read(JobView)


def events(job: str | JobView, *, after: int = 0) -> Stream:
    """What happens to a job, as it happens, until it is over.

    Broken connections are taken up again where they broke; every event comes once.

    Args:
        job: The job or its id.
        after: The number of the last event that is known already.
    """
    yield from following(id_of(job), after)


def wait(
    job: str | JobView,
    *,
    timeout_s: float | None = None,
    progress: Progress = True,
) -> Steps[JobView]:
    """Wait until a job is over.

    Args:
        job: The job or its id.
        timeout_s: Longest to wait; `None` as long as it takes.
        progress: Draw a bar on stderr where that is a terminal; or what to call for every event.

    Returns:
        The job with its result.

    Raises:
        DeadlineExceeded: It is not over yet, and goes on; or it ran into its own deadline.
        Cancelled: Somebody cancelled it.
        OutOfMemory, MeasurementError, StagewrightError: Why it failed.
    """
    found = job if isinstance(job, JobView) else None
    if found is None or not found.is_finished:
        with watched(progress) as show:
            yield from each(following(id_of(job), limit_s=timeout_s), show)
        call = get("jobs", id_of(job))
        found = (yield from exchange(call)).read(JobView)
    if found.state != "succeeded":
        raise error_of_job(found)
    return found


def id_of(job: str | JobView) -> str:
    """A job's id."""
    return job if isinstance(job, str) else job.id
