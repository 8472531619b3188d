"""Routes of the HTML pages and of the static files they load."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse

from ...core.errors import InvalidInput
from ...core.profile.diff import diff
from ...core.service.documents import ProfileSummary, StoredPlan
from ...formats.runtimes.registry import TARGETS
from ...view.layer_columns import build_profile_layers
from ...view.profile_view import describe_quality
from ...view.reproduce import ask_again
from ..auth.access import CurrentPrincipal, Principal
from ..http.pagination import Cursor, Search, blame_parameter
from ..http.preconditions import has_current
from ..middleware.browser_responses import SECURITY
from ..planning.what_if import ComparisonRequest
from ..routes.dependencies import ThePlanning, TheStore
from ..store.errors import RecordNotFound
from ..store.store import Store
from .compare_words import explain_fastest
from .documents import example_values, file_values
from .plan_names import name_summary
from .plan_views import TheViews, place_of_step
from .templates import assets, job_words, render

MAX_COMPARED = 8
MAX_PROFILES = 500
"""Profiles listed in the form of a new plan."""
MANY_PROFILES = 12
"""From here on the form offers a search field."""
MAX_EMBEDDED_DEVICES = 1024
"""Larger clusters are not embedded in a plan's page, where their links could be edited."""

ProfileId = Annotated[str, Query(max_length=80)]

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def home() -> Response:
    return RedirectResponse("/plans", 303)


@router.get("/static/{name}")
def static_file(name: str, request: Request) -> Response:
    found = assets().get(name)
    if found is None:
        raise RecordNotFound("file", name)
    headers = {**SECURITY, "ETag": f'"{found.tag}"', "Cache-Control": "no-cache"}
    if has_current(request.headers, found.tag):
        return Response(None, 304, headers)
    return Response(found.content, 200, headers, found.media_type)


@router.get("/plans")
async def plan_list(
    planning: ThePlanning,
    store: TheStore,
    principal: CurrentPrincipal,
    cursor: Cursor = None,
    search: Search = "",
) -> str:
    with blame_parameter("cursor"):
        page = await run_in_threadpool(
            store.documents.plans, principal.project_id, limit=50, cursor=cursor, search=search
        )
    if not (page.items or search or cursor):
        shown = await planning.run_in_solver(principal, example_values)
        return await run_in_threadpool(render, "start.html", here="plans", **shown)
    asked = {"search": search, "cursor": cursor}
    return await run_in_threadpool(
        render, "plans.html", here="plans", plans=page.items, next_cursor=page.next_cursor, **asked
    )


@router.post("/plans/file")
async def show_file(planning: ThePlanning, principal: CurrentPrincipal, request: Request) -> str:
    """Show a plan or a profile that somebody dropped on a page; nothing is stored."""
    body = await request.body()
    template, shown = await planning.run_in_solver(principal, file_values, body)
    return await run_in_threadpool(render, template, here="", **shown)


@router.get("/plans/progress")
def planning_phase(
    planning: ThePlanning, principal: CurrentPrincipal, request_id: str
) -> JSONResponse:
    """Say what the planning request with an ``X-Request-ID`` is doing; empty if unknown."""
    return JSONResponse({"text": planning.phases.describe(principal.project_id, request_id)})


@router.get("/plans/{plan_id}")
async def plan(store: TheStore, views: TheViews, plan_id: str, principal: CurrentPrincipal) -> str:
    stored = await run_in_threadpool(store.documents.plan, principal.project_id, plan_id)
    if stored.plan is None:
        return await run_in_threadpool(_infeasible, store, principal, stored)
    fits = len(stored.cluster.devices) <= MAX_EMBEDDED_DEVICES
    step = place_of_step(stored.plan)
    found = await views.of(principal, stored, with_step=step == "here")
    request = {
        "plan_id": stored.id,
        "profile_id": stored.profile_id,
        "options": stored.options.model_dump(mode="json"),
        "cluster": stored.cluster.model_dump(mode="json") if fits else None,
        "choices": found.choices,
        "step": step,
    }
    title = stored.name or found.name
    shown = {
        "stored": stored,
        "view": found.shown,
        "step": step,
        "title": title,
        "targets": tuple(TARGETS.values()),
    }
    # Markup: `view.html.data` has escaped the JSON for a script element already.
    block = Markup(found.text)
    return await run_in_threadpool(
        render, "live.html", here="plans", live=True, request=request, block=block, **shown
    )


def _infeasible(store: Store, principal: Principal, stored: StoredPlan) -> str:
    ways = stored.infeasible.ways_out if stored.infeasible else ()
    return render(
        "infeasible.html",
        here="plans",
        stored=stored,
        model=store.documents.plan_summary(principal.project_id, stored.id),
        ways=[way.model_dump(mode="json") for way in ways],
        again=ask_again(stored.profile_id, stored.cluster, stored.options),
    )


@router.get("/compare")
async def compare(
    planning: ThePlanning,
    store: TheStore,
    principal: CurrentPrincipal,
    id: Annotated[list[str] | None, Query()] = None,
) -> str:
    ids = list(dict.fromkeys(id or ()))
    if not 2 <= len(ids) <= MAX_COMPARED:
        recent = await run_in_threadpool(
            store.documents.plans, principal.project_id, limit=50, cursor=None
        )
        return render("choose.html", here="compare", plans=recent.items, chosen=ids)
    found = await planning.compare(principal, ComparisonRequest(plan_ids=tuple(ids)))
    reasons = explain_fastest(found)
    names = await run_in_threadpool(_names, store, principal, ids)
    return render("compare.html", here="compare", comparison=found, reasons=reasons, names=names)


def _names(store: Store, principal: Principal, plan_ids: list[str]) -> dict[str, str]:
    """Return what each plan is called."""
    of = store.documents.plan_summary
    return {one: name_summary(of(principal.project_id, one)) for one in plan_ids}


@router.get("/profiles")
def profile_list(store: TheStore, principal: CurrentPrincipal, cursor: Cursor = None) -> str:
    with blame_parameter("cursor"):
        page = store.documents.profiles(principal.project_id, limit=50, cursor=cursor)
    return render(
        "profiles.html", here="profiles", profiles=page.items, next_cursor=page.next_cursor
    )


@router.get("/profiles/{profile_id}")
async def profile(
    planning: ThePlanning,
    store: TheStore,
    profile_id: str,
    principal: CurrentPrincipal,
    beside: Annotated[str, Query(alias="with", max_length=80)] = "",
) -> str:
    values = await run_in_threadpool(_profile_values, store, principal, profile_id, beside)
    if values["other"] is not None:
        earlier, later = values["other"].profile, values["stored"].profile
        try:
            values["found"] = await planning.run_in_solver(principal, diff, earlier, later)
        except InvalidInput as error:
            values["problem"] = str(error)
    return await run_in_threadpool(render, "profile.html", here="profiles", **values)


def _profile_values(
    store: Store, principal: Principal, profile_id: str, beside: str
) -> dict[str, Any]:
    """Return the template's values for a profile and the one it is compared with, if any."""
    documents, project = store.documents, principal.project_id
    stored = documents.profile(project, profile_id)
    listed = documents.profiles(project, limit=50, cursor=None).items
    return {
        "stored": stored,
        "profile": stored.profile,
        "layers": build_profile_layers(stored.profile),
        "quality": describe_quality(stored.profile),
        "others": [one for one in listed if one.id != profile_id],
        "other": documents.profile(project, beside) if beside else None,
        "found": None,
        "problem": "",
    }


@router.get("/new")
def new_plan(store: TheStore, principal: CurrentPrincipal, profile_id: ProfileId = "") -> str:
    profiles = _profiles_with(store, principal, profile_id)
    return render("new.html", here="new", profiles=profiles, many=MANY_PROFILES)


def _profiles_with(store: Store, principal: Principal, wanted: str) -> tuple[ProfileSummary, ...]:
    """Return the newest profiles, and the wanted one even if it is older than those."""
    documents, project = store.documents, principal.project_id
    listed = documents.profiles(project, limit=MAX_PROFILES, cursor=None).items
    if not wanted or any(one.id == wanted for one in listed):
        return listed
    try:
        return (documents.profile_summary(project, wanted), *listed)
    except RecordNotFound:
        return listed


@router.get("/jobs")
def job_list(principal: CurrentPrincipal) -> str:
    return render("jobs.html", here="jobs")


@router.get("/jobs/{job_id}")
def job(store: TheStore, job_id: str, principal: CurrentPrincipal) -> str:
    # `request_json` looks in no project, so that the job is the caller's has to be checked first.
    kind = store.jobs.get(principal.project_id, job_id).kind
    words = job_words(kind, store.jobs.request_json(job_id))
    return render("job.html", here="jobs", job_id=job_id, words=words)
