"""``/v1/plans/{id}/view`` and ``/v1/views``: the data that a plan's page draws."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from ...view.plan_view import PlanView
from ..auth.access import CurrentPrincipal
from ..http.strict_requests import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..routes.idempotency import TAGGED, IfNoneMatch, of_release, tagged
from .plan_views import TheViews, ViewAnswer, ViewRequest

EXAMPLES: dict[str, Any] = {
    "cuts": {
        "summary": "A stored plan with other cuts",
        "value": {"plan_id": "plan_000000000000000000000001", "balance": [3, 1]},
    }
}

router = APIRouter(prefix="/v1", tags=["page"], route_class=StrictRoute, responses=PROBLEM_RESPONSE)


@router.get("/plans/{plan_id}/view", response_model=PlanView, responses=TAGGED)
async def get_view(
    views: TheViews,
    plan_id: str,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return a plan's numbers, layers, boxes, memory curves and folded graph, ready to draw."""
    found = await views.stored(principal, plan_id)
    return tagged(request, of_release(f"{plan_id}.view"), found.text)


@router.post("/views", response_model=ViewAnswer)
async def change_view(
    views: TheViews,
    body: Annotated[ViewRequest, Body(openapi_examples=EXAMPLES)],
    principal: CurrentPrincipal,
) -> Response:
    """Return the view of a stored plan with other cuts, devices or options; stores nothing."""
    return Response(await views.changed(principal, body), media_type="application/json")
