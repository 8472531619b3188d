"""``/v1/jobs`` and ``/v1/profile-jobs``: measurements that run on workers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import Body, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ...core.errors import StagewrightError
from ...core.service.jobs import FINAL_STATES, JobList, JobView
from ..auth.access import CurrentPrincipal
from ..fair_limits import Share
from ..http.examples import JOB_EXAMPLES
from ..http.pagination import Cursor, Limit, blame_parameter
from ..http.problems import RETRY_AFTER_S, Problem
from ..jobs.requests import ProfileJobRequest
from ..jobs.service import POLL_S, JobService
from ..store.records import Job, JobState, StoredJobEvent
from ..store.store import Store
from .dependencies import REUSED, TheAuthenticator, TheCreation, TheJobs, TheStore, strict_router

KEEP_ALIVE_S = 15.0
"""A silent stream sends a comment this often: proxies close idle connections, many after 60 s."""

CHECKED_S = 5.0
"""How often a stream checks that its reader is still allowed to read."""

PAGE = 200
"""Events read from the store at a time."""

EVENT_STREAM = "text/event-stream"

EVENT_SCHEMA = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}

After = Annotated[
    int | None,
    Query(ge=0, le=2**31, description="Start after this event; Last-Event-ID takes precedence."),
]
LastEventId = Annotated[
    str | None,
    Header(description="The last event received; the stream resumes after it."),
]

LOCATION = {"Location": {"schema": {"type": "string"}, "description": "The job's address."}}
ACCEPTED: dict[int | str, dict[str, object]] = {
    202: {"model": JobView, "headers": LOCATION, "description": "Not done yet; watch the job"}
}
MEASURED: dict[int | str, dict[str, object]] = {
    200: {"model": JobView, "headers": LOCATION, "description": "Measured before"}
}

router = strict_router("/v1", "jobs")


@router.post(
    "/profile-jobs", status_code=202, response_model=JobView, responses={**ACCEPTED, **MEASURED}
)
async def create_profile_job(
    jobs: TheJobs,
    body: Annotated[ProfileJobRequest, Body(openapi_examples=JOB_EXAMPLES)],
    creation: TheCreation,
) -> Response:
    """Measure a model on a worker and store its profile.

    An earlier measurement with the same sample, device, settings and releases is reused unless
    the request says ``Cache-Control: no-cache``.
    """

    async def make() -> Response:
        key = await creation.submit_key()
        job, known = await jobs.submit_profile(
            creation.principal, body, fresh=creation.is_fresh, submit_key=key
        )
        headers = {REUSED: "profile"} if known else {}
        return job_response(await jobs.view(job), 200 if known else 202, headers)

    return await creation.once(make)


def job_response(view: JobView, status: int, headers: dict[str, str]) -> Response:
    """Return a response with a job and its location."""
    headers = {"Location": f"/v1/jobs/{view.id}", **headers}
    return Response(view.model_dump_json(), status, headers, "application/json")


@router.get("/jobs")
async def list_jobs(
    jobs: TheJobs,
    principal: CurrentPrincipal,
    limit: Limit = 50,
    cursor: Cursor = None,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
) -> JobList:
    """List jobs, newest first."""
    with blame_parameter("cursor"):
        page = await jobs.list(principal.project_id, limit=limit, cursor=cursor, state=state)
    return JobList(jobs=await jobs.views(page.items), next_cursor=page.next_cursor)


@router.get("/jobs/{job_id}")
async def get_job(jobs: TheJobs, job_id: str, principal: CurrentPrincipal) -> JobView:
    """Return a job in its current state."""
    return await jobs.view(await jobs.get(principal.project_id, job_id))


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(jobs: TheJobs, job_id: str, principal: CurrentPrincipal) -> JobView:
    """Cancel a job and end its processes within a second or two; a finished job is unchanged."""
    return await jobs.view(await jobs.cancel(principal.project_id, job_id))


@router.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {EVENT_STREAM: {"schema": EVENT_SCHEMA}}}},
)
async def watch_job(
    jobs: TheJobs,
    store: TheStore,
    authenticator: TheAuthenticator,
    job_id: str,
    request: Request,
    principal: CurrentPrincipal,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Stream a job's events, numbered from 1, until it ends (server-sent events)."""

    async def may_read() -> bool:
        try:
            # Without a client's address: a key revoked meanwhile is no guess of a token.
            scope = {**request.scope, "client": None}
            found = await authenticator.principal(request.headers, scope)
        except (Problem, StagewrightError):
            return False
        return found.project_id == principal.project_id and "read" in found.scopes

    last = last_event_id or ""
    # Browsers resend whatever id they saw last; a malformed one must not fail the stream for good.
    seen = int(last) if last.isascii() and last.isdigit() and len(last) < 10 else (after or 0)
    job = await jobs.get(principal.project_id, job_id)
    holder = principal.owner, principal.project_id
    if not jobs.streams.has_room(*holder):
        raise Problem(
            429,
            "too-many-streams",
            f"One key may watch {jobs.streams.for_one} jobs at once, one project "
            f"{jobs.streams.for_project}, and all clients together {jobs.streams.for_all}. End a "
            "stream, or read the jobs now and then.",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )
    # Taken at once: of a hundred requests, each would find room until the first stream has begun.
    share = jobs.streams.take(*holder, 1)
    return _EventStream(_stream(jobs, store, job, seen, may_read), share)


class _EventStream(StreamingResponse):
    """Response with a job's events, which gives its share back when it ends."""

    def __init__(self, events: AsyncIterator[bytes], share: Share) -> None:
        super().__init__(
            events,
            media_type=EVENT_STREAM,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},  # nginx would buffer
        )
        self._share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Here and not in the generator, which never begins if the client has left already.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._share.give_back()


async def _stream(
    jobs: JobService,
    store: Store,
    job: Job,
    seen: int,
    may_read: Callable[[], Awaitable[bool]],
) -> AsyncIterator[bytes]:
    """Yield the events after number ``seen``, up to the job's end.

    The stream ends early if the server shuts down or the reader's access is revoked. A client that
    reconnects resumes where it stopped, or is refused.
    """
    project, job_id = job.project_id, job.id
    sent_s = checked_s = time.monotonic()
    with jobs.notifications.watch(job_id) as wait_for_change:
        while True:
            # The job is read before its events: one that is finished here has written them all.
            job = await jobs.get(project, job_id)
            while events := await run_in_threadpool(
                store.jobs.events, project, job_id, after=seen, limit=PAGE
            ):
                for event in events:
                    yield await _format_event(jobs, project, job_id, event)
                seen, sent_s = events[-1].number, time.monotonic()
            if job.is_finished or jobs.notifications.is_stopped:
                return
            if time.monotonic() - sent_s >= KEEP_ALIVE_S:
                sent_s = time.monotonic()
                yield b": still here\n\n"
            # Another server may run the job, and its events wake nobody here: hence the poll.
            await wait_for_change(POLL_S)
            if time.monotonic() - checked_s >= CHECKED_S:
                checked_s = time.monotonic()
                if not await may_read():
                    return


async def _format_event(
    jobs: JobService, project: str, job_id: str, event: StoredJobEvent
) -> bytes:
    """Format an event for the stream; the final one includes the job."""
    data = json.loads(event.data_json)
    data |= {"at": event.created_at.isoformat(), "attempt": event.attempt}
    if event.kind in FINAL_STATES:
        view = await jobs.view(await jobs.get(project, job_id))
        data |= {"job": view.model_dump(mode="json")}
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n".encode()
