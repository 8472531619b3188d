"""``/v1/profiles``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Response

from ..core.profile import Profile
from .auth.caller import CallerOfRequest
from .examples import profile_examples
from .json_body import StrictRoute
from .openapi import PROBLEM_RESPONSE
from .records import StoredProfile
from .services import Planning
from .store.contract import Store
from .store.records import Stored


def profile_routes(planning: Planning, store: Store) -> APIRouter:
    """Routes that keep and read profiles."""
    router = APIRouter(
        prefix="/v1/profiles",
        tags=["profiles"],
        route_class=StrictRoute,
        responses=PROBLEM_RESPONSE,
    )

    @router.post("", status_code=201)
    async def create_profile(
        profile: Annotated[Profile, Body(openapi_examples=profile_examples())],
        response: Response,
        caller: CallerOfRequest,
    ) -> Stored:
        """Keep a profile, to plan from it by its id."""
        stored = await planning.create_profile(caller.project_id, profile)
        response.headers["Location"] = f"/v1/profiles/{stored.id}"
        return stored

    @router.get("/{profile_id}")
    def get_profile(profile_id: str, caller: CallerOfRequest) -> StoredProfile:
        """A profile."""
        return store.documents.profile(caller.project_id, profile_id)

    return router
