"""``/v1/plans/{id}/view`` and ``/v1/views``: what the page draws, for other drawings too."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from ...view.plan_view import PlanView
from ..auth.principal import CurrentPrincipal
from ..http.strict_json import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..routes.idempotency import TAGGED, IfNoneMatch, of_release, tagged
from .plan_views import ViewAnswer, ViewRequest, Views


def view_routes(views: Views) -> APIRouter:
    """Routes that give everything there is to see of a plan."""
    router = APIRouter(
        prefix="/v1", tags=["page"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.get("/plans/{plan_id}/view", response_model=PlanView, responses=TAGGED)
    async def get_view(
        plan_id: str,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """A plan's numbers, layers, boxes, memory curves and folded graph, ready to be drawn."""
        found = await views.stored(principal, plan_id)
        return tagged(request, of_release(f"{plan_id}.view"), lambda: found.text)

    @router.post("/views", response_model=ViewAnswer)
    async def change_view(
        body: Annotated[ViewRequest, Body(openapi_examples=view_examples())],
        principal: CurrentPrincipal,
    ) -> Response:
        """The same of a stored plan with other cuts, devices or options; nothing is stored."""
        return Response(await views.changed(principal, body), media_type="application/json")

    return router


def view_examples() -> dict[str, Any]:
    """For ``POST /v1/views``."""
    request = {"plan_id": "plan_000000000000000000000001", "balance": [3, 1]}
    return {"cuts": {"summary": "A stored plan cut otherwise", "value": request}}
