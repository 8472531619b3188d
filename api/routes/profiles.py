"""``/v1/profiles``: stored profiles."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from starlette.concurrency import run_in_threadpool

from ...core.profile.profile import Profile
from ...core.service.documents import ProfileList, StoredProfile
from ..auth.access import CurrentPrincipal
from ..http.examples import profile_examples
from ..http.pagination import Cursor, Limit, cursor_checked
from ..http.strict_requests import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..planning.exports import ProfileFormat, export_headers, profile_text
from ..store.records import Stored
from .dependencies import ThePlanning, TheStore
from .idempotency import (
    TAGGED,
    IdempotencyKey,
    IfNoneMatch,
    created,
    of_release,
    once,
    tagged,
    tagged_elsewhere,
)

router = APIRouter(
    prefix="/v1/profiles", tags=["profiles"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
)


@router.post("", status_code=201, response_model=Stored)
async def create_profile(
    planning: ThePlanning,
    store: TheStore,
    profile: Annotated[Profile, Body(openapi_examples=profile_examples())],
    request: Request,
    principal: CurrentPrincipal,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Store a profile; plans can then name it by its id."""

    async def make() -> Response:
        stored = await planning.create_profile(principal.project_id, profile)
        return created(stored.model_dump_json(), f"/v1/profiles/{stored.id}")

    return await once(store.idempotency, principal, request, make)


@router.get("")
def list_profiles(
    store: TheStore, principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
) -> ProfileList:
    """List profiles, newest first."""
    with cursor_checked():
        page = store.documents.profiles(principal.project_id, limit=limit, cursor=cursor)
    return ProfileList(profiles=page.items, next_cursor=page.next_cursor)


@router.get("/{profile_id}", response_model=StoredProfile, responses=TAGGED)
def get_profile(
    store: TheStore,
    profile_id: str,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return a profile."""
    found = store.documents.profile_json(principal.project_id, profile_id)
    return tagged(request, profile_id, found)


@router.get(
    "/{profile_id}/export",
    response_model=Profile,
    responses={
        **TAGGED,
        200: {
            "description": "The file; JSON unless it is CSV.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        },
    },
)
async def export_profile(
    planning: ThePlanning,
    store: TheStore,
    profile_id: str,
    format: ProfileFormat,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Export the profile as a file: JSON for the command line, or CSV with one row per layer."""
    stored = await run_in_threadpool(store.documents.profile_json, principal.project_id, profile_id)
    media_type, ending = ("text/csv", "csv") if format == "csv" else ("application/json", "json")
    return await tagged_elsewhere(
        request,
        of_release(f"{profile_id}.{format}"),
        lambda: planning.run_in_solver(profile_text, stored, format),
        media_type,
        export_headers(f"{profile_id}.{ending}"),
    )
