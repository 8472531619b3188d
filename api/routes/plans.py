"""``/v1/plans``: plans, made from a profile, an estimate or a measurement.

``/v1/simulations`` and ``/v1/comparisons`` answer questions about plans and store nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import Body, Depends, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ...core.plan.timeline import Timeline
from ...core.service.documents import PlanLabels, PlanList, PlanSummary, StoredPlan
from ...formats.runtimes.registry import find_target
from ..auth.access import CurrentPrincipal
from ..http.disconnect import while_connected
from ..http.examples import (
    COMPARISON_EXAMPLES,
    LABEL_EXAMPLES,
    PLAN_EXAMPLES,
    SIMULATION_EXAMPLES,
)
from ..http.pagination import Cursor, Limit, Search, blame_parameter
from ..http.preconditions import CHANGED, Precondition
from ..http.problems import rebuild_problem
from ..jobs.outcome import read_problem
from ..planning.exports import MEDIA_TYPES, PlanFormat, TraceFile, plan_text, runtime_text
from ..planning.requests import PlanRequest
from ..planning.service import PlanResult
from ..planning.what_if import Comparison, ComparisonRequest, Simulation, SimulationRequest
from .dependencies import (
    OF_BODY,
    REUSED,
    TAGGED,
    TheCreation,
    TheJobs,
    ThePlanning,
    TheReading,
    TheSettings,
    TheStore,
    created,
    strict_router,
)
from .jobs import ACCEPTED, job_response

CREATED = {
    "content": {"text/plain": {"schema": {"type": "string", "examples": ["[7, 8]\n"]}}},
    "headers": {
        "Location": {"schema": {"type": "string"}, "description": "The plan's address."},
        REUSED: {
            "schema": {"type": "string", "enum": ["plan", "profile"]},
            "description": "Computed earlier: this very plan, or the model's costs. "
            "Send 'Cache-Control: no-cache' to have everything computed again.",
        },
    },
}

DEFAULT_WAIT_S = 60.0
"""For requests that state no preference."""

SLACK_S = 5.0
"""A request may wait for this long beyond the longest measurement, until its end is stored."""

APPLIED = "Preference-Applied"

FileName = Annotated[
    str | None, Query(max_length=100, description="A further file that the form reads.")
]

Prefer = Annotated[
    list[str] | None,
    Header(
        description="`wait=N`: respond after at most N seconds, with the job if it has not ended; "
        "`respond-async`: respond with the job at once.",
    ),
]

router = strict_router("/v1/plans", "plans")
what_if = strict_router("/v1", "what if")


def wait_of(prefer: list[str] | None, longest_s: float) -> tuple[float, str | None]:
    """Return the seconds to wait and the applied preference (RFC 7240); ignore malformed ones.

    Waiting much longer than ``longest_s``, the deadline of one measurement, is pointless.
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


async def _waiting(settings: TheSettings, prefer: Prefer = None) -> tuple[float, str | None]:
    return wait_of(prefer, settings.measure_deadline_s)


@router.post("", status_code=201, response_model=StoredPlan, responses={201: CREATED, **ACCEPTED})
async def create_plan(
    planning: ThePlanning,
    jobs: TheJobs,
    store: TheStore,
    body: Annotated[PlanRequest, Body(openapi_examples=PLAN_EXAMPLES)],
    creation: TheCreation,
    waiting: Annotated[tuple[float, str | None], Depends(_waiting)],
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

    With ``Accept: text/plain`` the response is the balance alone, such as ``[7, 8]``, and a problem
    of type ``no-plan`` if nothing fits.
    """
    principal, (wait_s, applied) = creation.principal, waiting

    async def make() -> Response:
        search = planning.create_plan(
            principal, body, jobs.find_measurement, fresh=creation.is_fresh
        )
        # With an idempotency key the client can come back for the response, so the search goes on
        # without it; otherwise a client that disconnects frees the solver process.
        is_kept = creation.has_key
        answer = await (search if is_kept else while_connected(creation.request.receive, search))
        if isinstance(answer, PlanResult):
            return _plan_response(answer.plan_id, answer.text, answer.reused)
        submit_key = await creation.submit_key()
        job = await jobs.submit_plan(principal, body, answer, submit_key=submit_key)
        job = await jobs.wait(job, wait_s, even_unserved=applied is not None)
        headers = {} if applied is None else {APPLIED: applied}
        if job.state == "failed" and (problem := read_problem(job.outcome_json)) is not None:
            raise rebuild_problem(problem)
        if job.state != "succeeded" or job.result_id is None:
            return job_response(await jobs.view(job), 202, headers)
        project, plan_id = principal.project_id, job.result_id
        text = await run_in_threadpool(store.documents.json, "plan", project, plan_id)
        return _plan_response(plan_id, text, None, headers)

    answer = await creation.once(make)
    if answer.status_code != 201 or not _wants_text(creation.request):
        return answer
    # Made from the answer in JSON, which is what was stored for the idempotency key.
    balance = await planning.run_in_solver(
        principal, plan_text, bytes(answer.body).decode(), "balance"
    )
    headers = {name: text for name, text in answer.headers.items() if name not in OF_BODY}
    return Response(balance, 201, headers, "text/plain")


def _wants_text(request: Request) -> bool:
    """Return True if the client asks for plain text and would not take JSON."""
    accepted = ",".join(request.headers.getlist("accept")).lower().split(",")
    kinds = {entry.partition(";")[0].strip() for entry in accepted}
    return "text/plain" in kinds and "application/json" not in kinds


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
    with blame_parameter("cursor"):
        page = store.documents.plans(
            principal.project_id, limit=limit, cursor=cursor, search=search
        )
    return PlanList(plans=page.items, next_cursor=page.next_cursor)


@router.get(
    "/{plan_id}",
    response_model=StoredPlan | Plan | Schedule | Timeline | TraceFile,
    responses={
        **TAGGED,
        200: {
            "description": "The plan, or what `format` asks for.",
            "content": {
                kind: {"schema": {"type": "string"}} for kind in ("image/svg+xml", "text/plain")
            },
        },
    },
)
async def get_plan(
    planning: ThePlanning, plan_id: str, reading: TheReading, format: PlanFormat | None = None
) -> Response:
    """Return a plan with the request that it answers, or the plan in another form.

    ``schedule`` is the order of actions of every rank, ``timeline`` the simulated start and end of
    every action of a step, ``balance`` the number of layers of every stage. ``plan`` (for the
    command line), ``svg`` and ``chrome_trace`` are files.
    """
    # Read first, even for a client that has the document: it may have lost the right to see it.
    tag, record = await run_in_threadpool(reading.document, "plan", plan_id)
    if format is None:
        return reading.respond(tag, record)
    media_type, ending = MEDIA_TYPES[format]
    return await reading.respond_derived(
        f"{plan_id}.{format}",
        lambda: planning.run_in_solver(reading.principal, plan_text, record, format),
        media_type,
        ending and f"{plan_id}.{ending}",
    )


@router.get(
    "/{plan_id}/exports/{target}",
    response_class=Response,
    responses={
        **TAGGED,
        200: {
            "description": "The runtime's form of the plan, with how to use it.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
    },
)
async def export_plan(
    planning: ThePlanning, plan_id: str, target: str, reading: TheReading, file: FileName = None
) -> Response:
    """Return a plan in the form of another runtime, such as ``megatron`` or ``vllm``.

    What the runtime cannot express is refused (422), each with the option that avoids it. ``file``
    asks for one of the further files that some forms read, such as ``schedule.csv``.
    """
    _, record = await run_in_threadpool(reading.document, "plan", plan_id)
    name = file or find_target(target).file_name
    return await reading.respond_derived(
        f"{plan_id}.{target}.{name}",
        lambda: planning.run_in_solver(reading.principal, runtime_text, record, target, file),
        "text/plain",
        name,
    )


@router.patch("/{plan_id}", responses=CHANGED)
def label_plan(
    store: TheStore,
    plan_id: str,
    labels: Annotated[PlanLabels, Body(openapi_examples=LABEL_EXAMPLES)],
    principal: CurrentPrincipal,
    check_tag: Precondition,
) -> PlanSummary:
    """Name a plan, tag it or note something about it; labels not given stay as they are."""
    changes = labels.model_dump(include=labels.model_fields_set)
    return store.documents.label_plan(principal.project_id, plan_id, changes, check_tag)


@router.delete("/{plan_id}", status_code=204, responses=CHANGED)
def delete_plan(
    store: TheStore, plan_id: str, principal: CurrentPrincipal, check_tag: Precondition
) -> None:
    """Delete a plan; its profile stays."""
    store.documents.delete("plan", principal.project_id, plan_id, check_tag)


@what_if.post("/simulations", response_model=Simulation)
async def simulate(
    planning: ThePlanning,
    body: Annotated[SimulationRequest, Body(openapi_examples=SIMULATION_EXAMPLES)],
    principal: CurrentPrincipal,
) -> Response:
    """Simulate a given split: other cuts, devices or options than a plan has."""
    found = await planning.simulate(principal, body)
    # Serialized here: FastAPI would validate a timeline of 100,000 actions a second time.
    return Response(found.model_dump_json(), media_type="application/json")


@what_if.post("/comparisons")
async def compare(
    planning: ThePlanning,
    body: Annotated[ComparisonRequest, Body(openapi_examples=COMPARISON_EXAMPLES)],
    principal: CurrentPrincipal,
) -> Comparison:
    """Compare two to eight stored plans."""
    return await planning.compare(principal, body)
