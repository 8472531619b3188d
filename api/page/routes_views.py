"""``/v1/plans/{id}/view`` and ``/v1/views``: the data that a plan's page draws."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response

from ... import __version__
from ...view.plan_view import PlanView
from ..auth.access import CurrentPrincipal
from ..http.strict_requests import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..routes.dependencies import TAGGED, TheReading
from .plan_views import TheViews, ViewAnswer, ViewRequest

EXAMPLES: dict[str, Any] = {
    "cuts": {
        "summary": "A stored plan with other cuts",
        "value": {"plan_id": "plan_000000000000000000000001", "balance": [3, 1]},
    }
}

router = APIRouter(prefix="/v1", tags=["page"], route_class=StrictRoute, responses=PROBLEM_RESPONSE)


@router.get("/plans/{plan_id}/view", response_model=PlanView, responses=TAGGED)
async def get_view(views: TheViews, plan_id: str, reading: TheReading) -> Response:
    """Return a plan's numbers, layers, boxes, memory curves and folded graph, ready to draw."""
    found = await views.stored(reading.principal, plan_id)
    return reading.tagged(f"{plan_id}.view.{__version__}", found.text)


@router.post("/views", response_model=ViewAnswer)
async def change_view(
    views: TheViews,
    body: Annotated[ViewRequest, Body(openapi_examples=EXAMPLES)],
    principal: CurrentPrincipal,
) -> Response:
    """Return the view of a stored plan with other cuts, devices or options; stores nothing."""
    return Response(await views.changed(principal, body), media_type="application/json")
