"""``/v1/plans``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from starlette.concurrency import run_in_threadpool

from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ...core.plan.timeline import Timeline
from ...core.service.documents import PlanList
from ...core.service.plans import StoredPlan
from ..auth.principal import CurrentPrincipal, Principal
from ..http.disconnect import while_connected
from ..http.examples import plan_examples
from ..http.pagination import Cursor, Limit, Search, cursor_checked
from ..http.strict_json import StrictRoute
from ..jobs.outcome import from_json, to_exception
from ..jobs.service import JobService
from ..openapi import PROBLEM_RESPONSE
from ..planning.exports import (
    EXPORTED,
    MEDIA_TYPES,
    PlanForm,
    PlanFormat,
    TraceFile,
    no_plan,
    plan_text,
)
from ..planning.requests import PlanRequest
from ..planning.service import Answered, Planning
from ..store.base import Store
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
from .preferences import APPLIED, Prefer, wait_of

CREATED = {
    "headers": {
        "Location": {"schema": {"type": "string"}, "description": "Where the plan is."},
        REUSED: {
            "schema": {"type": "string", "enum": ["plan", "profile"]},
            "description": "What had been found out before: this very plan, or the model's costs. "
            "Send 'Cache-Control: no-cache' to have everything found out again.",
        },
    }
}


def plan_routes(
    planning: Planning, jobs: JobService, store: Store, *, measure_deadline_s: float
) -> APIRouter:
    """Routes that make and read plans."""
    router = APIRouter(
        prefix="/v1/plans", tags=["plans"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.post(
        "", status_code=201, response_model=StoredPlan, responses={201: CREATED, **ACCEPTED}
    )
    async def create_plan(
        body: Annotated[PlanRequest, Body(openapi_examples=plan_examples())],
        request: Request,
        principal: CurrentPrincipal,
        idempotency_key: IdempotencyKey = None,
        prefer: Prefer = None,
    ) -> Response:
        """Plan a model's pipeline stages, estimating or measuring it first if no profile is given.

        What has to be measured makes a job. If that has not ended in the time the request waits
        (``Prefer: wait=N``), it is the answer, with status 202, and goes on without the caller.
        So it is at once if no worker offers what it needs and the request does not say to wait.

        That nothing fits is an answer too: its status is ``infeasible``. If no plan was found
        before the deadline and none was proven impossible, the answer is a problem of type
        ``deadline-exceeded``, with status 422 if the request set ``deadline_s`` and 504 if not;
        ask for less, or allow more time.
        """
        wait_s, applied = wait_of(prefer, measure_deadline_s)

        async def make() -> Response:
            search = planning.create_plan(
                principal, body, jobs.measured_before, fresh=is_fresh(request)
            )
            is_kept = idempotency_key is not None  # whoever asks again with it finds the answer
            answer = await (search if is_kept else while_connected(request.receive, search))
            if isinstance(answer, Answered):
                return plan_response(answer.plan_id, answer.text, answer.reused)
            job = await jobs.submit_plan(
                principal, body, answer, submit_key=await submit_key(request)
            )
            job = await jobs.wait(job, wait_s, even_unserved=applied is not None)
            headers = {} if applied is None else {APPLIED: applied}
            if job.state == "failed" and (problem := from_json(job.outcome_json)) is not None:
                raise to_exception(problem)
            if job.state != "succeeded" or job.result_id is None:
                return job_response(await jobs.view(job), 202, headers)
            project, plan_id = principal.project_id, job.result_id
            text = await run_in_threadpool(store.documents.plan_json, project, plan_id)
            return plan_response(plan_id, text, None, headers)

        return await once(store.idempotency, principal, request, make)

    @router.get("")
    def list_plans(
        principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None, search: Search = ""
    ) -> PlanList:
        """Plans, newest first."""
        with cursor_checked():
            page = store.documents.plans(
                principal.project_id, limit=limit, cursor=cursor, search=search
            )
        return PlanList(plans=page.items, next_cursor=page.next_cursor)

    @router.get("/{plan_id}", response_model=StoredPlan, responses=TAGGED)
    def get_plan(
        plan_id: str,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """A plan with the request it answers."""
        found = store.documents.plan_json(principal.project_id, plan_id)
        return tagged(request, plan_id, lambda: found)

    async def drawn(
        plan_id: str,
        form: PlanForm,
        request: Request,
        principal: Principal,
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """A stored plan in another form, made where plans are searched for."""
        record = await run_in_threadpool(store.documents.plan_json, principal.project_id, plan_id)

        async def made() -> str:
            text = await planning.elsewhere(plan_text, record, form)
            if text is None:
                raise no_plan(plan_id)
            return text

        tag = of_release(f"{plan_id}.{form}")
        return await tagged_elsewhere(request, tag, made, media_type, headers)

    @router.get("/{plan_id}/schedule", response_model=Schedule, responses=TAGGED)
    async def get_schedule(
        plan_id: str,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """The order of work of every rank."""
        return await drawn(plan_id, "schedule", request, principal)

    @router.get("/{plan_id}/timeline", response_model=Timeline, responses=TAGGED)
    async def get_timeline(
        plan_id: str,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """When every action of a step happens, as simulated."""
        return await drawn(plan_id, "timeline", request, principal)

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
        plan_id: str,
        format: PlanFormat,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """The plan as a file: for the command line, as a drawing, or as a trace for a viewer."""
        media_type, ending = MEDIA_TYPES[format]
        named = f'attachment; filename="{plan_id}.{ending}"'
        headers = {**EXPORTED, "Content-Disposition": named}
        return await drawn(plan_id, format, request, principal, media_type, headers)

    return router


def plan_response(
    plan_id: str, text: str, reused: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    """201 with a plan, where it is, and what had been found out before."""
    said = {**(headers or {}), **({} if reused is None else {REUSED: reused})}
    return created(text, f"/v1/plans/{plan_id}", said)
