"""``/v1/jobs`` and ``/v1/profile-jobs``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Body, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from ...core.errors import StagewrightError
from ...core.service.jobs import FINAL_STATES, JobList, JobView
from ..auth.authenticate import Authenticator
from ..auth.principal import CurrentPrincipal
from ..http.examples import job_examples
from ..http.pagination import Cursor, Limit, cursor_checked
from ..http.problems import Problem
from ..http.strict_json import StrictRoute
from ..jobs.requests import ProfileJobRequest
from ..jobs.service import POLL_S, JobService
from ..openapi import PROBLEM_RESPONSE
from ..store.base import Store
from ..store.records import Job, JobEvent, JobState
from .idempotency import REUSED, IdempotencyKey, is_fresh, once, submit_key

KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say says so, before somebody between takes it for dead."""

PAGE = 200
"""Events read at a time."""

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

REPORTED = frozenset({"progress"})
"""Events that workers word."""

After = Annotated[
    int | None,
    Query(ge=0, le=2**31, description="Begin after this event; the header, if both are sent."),
]
LastEventId = Annotated[
    str | None,
    Header(description="The last event seen; the stream goes on after it."),
]

LOCATION = {"Location": {"schema": {"type": "string"}, "description": "Where the job is."}}
ACCEPTED: dict[int | str, dict[str, object]] = {
    202: {"model": JobView, "headers": LOCATION, "description": "Not done yet; watch the job"}
}


CHECKED_S = 5.0
"""How often it is asked whether a stream's reader may still read."""


def job_routes(jobs: JobService, store: Store, authenticator: Authenticator) -> APIRouter:
    """Routes that make, show and cancel jobs."""
    router = APIRouter(
        prefix="/v1", tags=["jobs"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.post(
        "/profile-jobs",
        status_code=202,
        response_model=JobView,
        responses={
            **ACCEPTED,
            200: {"model": JobView, "headers": LOCATION, "description": "Measured before"},
        },
    )
    async def create_profile_job(
        body: Annotated[ProfileJobRequest, Body(openapi_examples=job_examples())],
        request: Request,
        principal: CurrentPrincipal,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """Measure a model on a worker, and keep its profile.

        What was measured before, with the same sample, device, settings and releases, is not
        measured again unless ``Cache-Control: no-cache`` asks for it.
        """

        async def make() -> Response:
            key = await submit_key(request)
            job, known = await jobs.submit_profile(
                principal, body, fresh=is_fresh(request), submit_key=key
            )
            headers = {REUSED: "profile"} if known else {}
            return job_response(await jobs.view(job), 200 if known else 202, headers)

        return await once(store.idempotency, principal, request, make)

    @router.get("/jobs")
    async def list_jobs(
        principal: CurrentPrincipal,
        limit: Limit = 50,
        cursor: Cursor = None,
        state: Annotated[JobState | None, Query(description="Only those.")] = None,
    ) -> JobList:
        """Jobs, newest first."""
        with cursor_checked():
            page = await jobs.list(principal.project_id, limit=limit, cursor=cursor, state=state)
        return JobList(jobs=await jobs.views(page.items), next_cursor=page.next_cursor)

    @router.get("/jobs/{job_id}")
    async def get_job(job_id: str, principal: CurrentPrincipal) -> JobView:
        """A job as it stands."""
        return await jobs.view(await jobs.get(principal.project_id, job_id))

    @router.post("/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str, principal: CurrentPrincipal) -> JobView:
        """End a job and all its processes, within a second or two; one that has ended stays."""
        return await jobs.view(await jobs.cancel(principal.project_id, job_id))

    @router.get(
        "/jobs/{job_id}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {EVENT_STREAM: {"schema": EVENT_SCHEMA}}}},
    )
    async def watch_job(
        job_id: str,
        request: Request,
        principal: CurrentPrincipal,
        after: After = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        """What happens to a job, as server-sent events numbered from 1, up to its end."""

        async def may_read() -> bool:
            try:
                found = await authenticator.principal(request.headers)
            except (Problem, StagewrightError):
                return False
            return found.project_id == principal.project_id and "read" in found.scopes

        last = last_event_id or ""
        seen = int(last) if last.isascii() and last.isdigit() and len(last) < 10 else (after or 0)
        job = await jobs.get(principal.project_id, job_id)
        return StreamingResponse(
            _stream(jobs, store, job, seen, may_read),
            media_type=EVENT_STREAM,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return router


def job_response(view: JobView, status: int, headers: dict[str, str]) -> Response:
    """A job as an answer, and where it is."""
    return Response(
        view.model_dump_json(),
        status,
        {"Location": f"/v1/jobs/{view.id}", **headers},
        "application/json",
    )


async def _stream(
    jobs: JobService, store: Store, job: Job, seen: int, may_read: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Events after the one seen, up to the last.

    Ends early when the server does, or when its reader may read no more; who comes again is
    refused, or goes on where it ended.
    """
    project, job_id = job.project_id, job.id
    said_s = checked_s = time.monotonic()
    with jobs.board.watch(job_id) as watch:
        while True:
            job = await jobs.get(project, job_id)
            while events := await run_in_threadpool(
                store.jobs.events, project, job_id, after=seen, limit=PAGE
            ):
                for event in events:
                    yield await _written(jobs, project, job_id, event)
                seen, said_s = events[-1].number, time.monotonic()
            if job.is_finished or jobs.board.is_stopped:  # and what it ended with was sent
                return
            if time.monotonic() - said_s >= KEEP_ALIVE_S:
                said_s = time.monotonic()
                yield b": still here\n\n"
            await watch.wait(POLL_S)
            if time.monotonic() - checked_s >= CHECKED_S:
                checked_s = time.monotonic()
                if not await may_read():
                    return


async def _written(jobs: JobService, project: str, job_id: str, event: JobEvent) -> bytes:
    """An event as it is sent; the last one has the job with it."""
    data = json.loads(event.data_json)
    if event.kind not in REPORTED:
        data |= {"at": event.created_at.isoformat(), "attempt": event.attempt}
    if event.kind in FINAL_STATES:
        view = await jobs.view(await jobs.get(project, job_id))
        data |= {"job": view.model_dump(mode="json")}
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n".encode()
