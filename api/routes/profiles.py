"""``/v1/profiles``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from starlette.concurrency import run_in_threadpool

from ...core.profile.profile import Profile
from ...core.service.documents import ProfileList, StoredProfile
from ..auth.principal import CurrentPrincipal
from ..http.examples import profile_examples
from ..http.pagination import Cursor, Limit, cursor_checked
from ..http.strict_json import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..planning.exports import EXPORTED, ProfileFormat, profile_text
from ..planning.service import Planning
from ..store.base import Store
from ..store.records import Stored
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


def profile_routes(planning: Planning, store: Store) -> APIRouter:
    """Routes that keep and read profiles."""
    router = APIRouter(
        prefix="/v1/profiles",
        tags=["profiles"],
        route_class=StrictRoute,
        responses=PROBLEM_RESPONSE,
    )

    @router.post("", status_code=201, response_model=Stored)
    async def create_profile(
        profile: Annotated[Profile, Body(openapi_examples=profile_examples())],
        request: Request,
        principal: CurrentPrincipal,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """Keep a profile, to plan from it by its id."""

        async def make() -> Response:
            stored = await planning.create_profile(principal.project_id, profile)
            return created(stored.model_dump_json(), f"/v1/profiles/{stored.id}")

        return await once(store.idempotency, principal, request, make)

    @router.get("")
    def list_profiles(
        principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
    ) -> ProfileList:
        """Profiles, newest first."""
        with cursor_checked():
            page = store.documents.profiles(principal.project_id, limit=limit, cursor=cursor)
        return ProfileList(profiles=page.items, next_cursor=page.next_cursor)

    @router.get("/{profile_id}", response_model=StoredProfile, responses=TAGGED)
    def get_profile(
        profile_id: str,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """A profile."""
        found = store.documents.profile_json(principal.project_id, profile_id)
        return tagged(request, profile_id, lambda: found)

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
        profile_id: str,
        format: ProfileFormat,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """The profile as a file: for the command line, or a row a layer."""
        stored = await run_in_threadpool(
            store.documents.profile_json, principal.project_id, profile_id
        )
        is_csv = format == "csv"
        return await tagged_elsewhere(
            request,
            of_release(f"{profile_id}.{format}"),
            lambda: planning.elsewhere(profile_text, stored, format),
            "text/csv" if is_csv else "application/json",
            {
                **EXPORTED,
                "Content-Disposition": "attachment; "
                f'filename="{profile_id}.{"csv" if is_csv else "json"}"',
            },
        )

    return router
