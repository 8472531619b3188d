"""``/v1/plans``: plans, made from a profile, an estimate or a measurement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Body, Header, Request, Response
from starlette.concurrency import run_in_threadpool

from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ...core.plan.timeline import Timeline
from ...core.service.documents import PlanList, StoredPlan
from ..auth.access import CurrentPrincipal, Principal
from ..http.disconnect import while_connected
from ..http.examples import plan_examples
from ..http.pagination import Cursor, Limit, Search, cursor_checked
from ..http.strict_requests import StrictRoute
from ..jobs.outcome import read_problem, to_exception
from ..openapi import PROBLEM_RESPONSE
from ..planning.exports import (
    MEDIA_TYPES,
    PlanForm,
    PlanFormat,
    TraceFile,
    export_headers,
    no_plan,
    plan_text,
)
from ..planning.requests import PlanRequest
from ..planning.service import Planning, PlanResult
from ..store.store import Store
from .dependencies import TheJobs, ThePlanning, TheSettings, TheStore
from .idempotency import (
    REUSED,
    TAGGED,
    IdempotencyKey,
    IfNoneMatch,
    created,
    is_fresh,
    of_release,
    once,
    submit_key,
    tagged,
    tagged_elsewhere,
)
from .jobs import ACCEPTED, job_response

CREATED = {
    "headers": {
        "Location": {"schema": {"type": "string"}, "description": "The plan's address."},
        REUSED: {
            "schema": {"type": "string", "enum": ["plan", "profile"]},
            "description": "Computed earlier: this very plan, or the model's costs. "
            "Send 'Cache-Control: no-cache' to have everything computed again.",
        },
    }
}

DEFAULT_WAIT_S = 60.0
"""For requests that state no preference."""

SLACK_S = 5.0
"""A request may wait for this long beyond the longest measurement, until its end is stored."""

APPLIED = "Preference-Applied"

Prefer = Annotated[
    list[str] | None,
    Header(
        description="`wait=N`: respond after at most N seconds, with the job if it has not ended; "
        "`respond-async`: respond with the job at once.",
    ),
]

router = APIRouter(
    prefix="/v1/plans", tags=["plans"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
)


@router.post("", status_code=201, response_model=StoredPlan, responses={201: CREATED, **ACCEPTED})
async def create_plan(
    planning: ThePlanning,
    jobs: TheJobs,
    store: TheStore,
    settings: TheSettings,
    body: Annotated[PlanRequest, Body(openapi_examples=plan_examples())],
    request: Request,
    principal: CurrentPrincipal,
    idempotency_key: IdempotencyKey = None,
    prefer: Prefer = None,
) -> Response:
    """Plan a model's pipeline stages; estimate or measure the model first if there is no profile.

    A measurement runs as a job. If the job has not ended while the request waits
    (``Prefer: wait=N``), the response is the job, with status 202, and the job goes on. The
    response is immediate if no worker offers what the job needs and the request does not ask to
    wait.

    A request that no plan can satisfy gets a plan document with the status ``infeasible``. If the
    deadline passes before any plan is found or infeasibility is proven, the response is a problem
    of type ``deadline-exceeded``: status 422 if the request set ``deadline_s``, 504 otherwise. Ask
    for less, or allow more time.
    """
    wait_s, applied = wait_of(prefer, settings.measure_deadline_s)

    async def make() -> Response:
        search = planning.create_plan(
            principal, body, jobs.find_measurement, fresh=is_fresh(request)
        )
        # With an idempotency key the client can come back for the response, so the search goes on
        # without it; otherwise a client that disconnects frees the solver process.
        is_kept = idempotency_key is not None
        answer = await (search if is_kept else while_connected(request.receive, search))
        if isinstance(answer, PlanResult):
            return _plan_response(answer.plan_id, answer.text, answer.reused)
        job = await jobs.submit_plan(principal, body, answer, submit_key=await submit_key(request))
        job = await jobs.wait(job, wait_s, even_unserved=applied is not None)
        headers = {} if applied is None else {APPLIED: applied}
        if job.state == "failed" and (problem := read_problem(job.outcome_json)) is not None:
            raise to_exception(problem)
        if job.state != "succeeded" or job.result_id is None:
            return job_response(await jobs.view(job), 202, headers)
        project, plan_id = principal.project_id, job.result_id
        text = await run_in_threadpool(store.documents.plan_json, project, plan_id)
        return _plan_response(plan_id, text, None, headers)

    return await once(store.idempotency, principal, request, make)


def wait_of(prefer: list[str] | None, longest_s: float) -> tuple[float, str | None]:
    """Return the seconds to wait and the applied preference (RFC 7240); ignore malformed ones.

    Args:
        prefer: All ``Prefer`` headers.
        longest_s: Deadline of one measurement; waiting longer is pointless.
    """
    longest_s = longest_s + SLACK_S
    preferences = [part.strip().lower() for line in prefer or () for part in line.split(",")]
    for preference in preferences:
        match = re.fullmatch(r'wait\s*=\s*"?(\d{1,9})"?', preference)
        if match:
            seconds = min(float(match[1]), longest_s)
            return seconds, f"wait={seconds:g}"
    if "respond-async" in preferences:
        return 0.0, "respond-async"
    return min(DEFAULT_WAIT_S, longest_s), None


def _plan_response(
    plan_id: str, text: str, reused: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    added = {} if reused is None else {REUSED: reused}
    return created(text, f"/v1/plans/{plan_id}", {**(headers or {}), **added})


@router.get("")
def list_plans(
    store: TheStore,
    principal: CurrentPrincipal,
    limit: Limit = 50,
    cursor: Cursor = None,
    search: Search = "",
) -> PlanList:
    """List plans, newest first."""
    with cursor_checked():
        page = store.documents.plans(
            principal.project_id, limit=limit, cursor=cursor, search=search
        )
    return PlanList(plans=page.items, next_cursor=page.next_cursor)


@router.get("/{plan_id}", response_model=StoredPlan, responses=TAGGED)
def get_plan(
    store: TheStore,
    plan_id: str,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return a plan with the request that it answers."""
    return tagged(request, plan_id, store.documents.plan_json(principal.project_id, plan_id))


@router.get("/{plan_id}/schedule", response_model=Schedule, responses=TAGGED)
async def get_schedule(
    planning: ThePlanning,
    store: TheStore,
    plan_id: str,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the order of actions of every rank."""
    return await _converted(planning, store, plan_id, "schedule", request, principal)


@router.get("/{plan_id}/timeline", response_model=Timeline, responses=TAGGED)
async def get_timeline(
    planning: ThePlanning,
    store: TheStore,
    plan_id: str,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return the simulated start and end of every action of a step."""
    return await _converted(planning, store, plan_id, "timeline", request, principal)


@router.get(
    "/{plan_id}/export",
    response_model=Plan | TraceFile,
    responses={
        **TAGGED,
        200: {
            "description": "The file; JSON unless it is SVG.",
            "content": {"image/svg+xml": {"schema": {"type": "string"}}},
        },
    },
)
async def export_plan(
    planning: ThePlanning,
    store: TheStore,
    plan_id: str,
    format: PlanFormat,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Export the plan as a file: for the command line, as a drawing, or as a trace for a viewer."""
    media_type, ending = MEDIA_TYPES[format]
    headers = export_headers(f"{plan_id}.{ending}")
    return await _converted(
        planning, store, plan_id, format, request, principal, media_type, headers
    )


async def _converted(
    planning: Planning,
    store: Store,
    plan_id: str,
    form: PlanForm,
    request: Request,
    principal: Principal,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a stored plan in another form, converted in a solver process."""
    # Read first, even for a client that has the document: it may have lost the right to see it.
    record = await run_in_threadpool(store.documents.plan_json, principal.project_id, plan_id)

    async def make() -> str:
        text = await planning.run_in_solver(plan_text, record, form)
        if text is None:
            raise no_plan(plan_id)
        return text

    tag = of_release(f"{plan_id}.{form}")
    return await tagged_elsewhere(request, tag, make, media_type, headers)
