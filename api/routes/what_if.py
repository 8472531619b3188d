"""``/v1/simulations`` and ``/v1/comparisons``: answered at once, and nothing is stored."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Response

from ..auth.principal import CurrentPrincipal
from ..http.examples import comparison_examples, simulation_examples
from ..http.strict_json import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..planning.service import Planning
from ..planning.what_if import Comparison, ComparisonRequest, Simulation, SimulationRequest


def what_if_routes(planning: Planning) -> APIRouter:
    """Routes that answer questions about plans."""
    router = APIRouter(
        prefix="/v1", tags=["what if"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.post("/simulations", response_model=Simulation)
    async def simulate(
        body: Annotated[SimulationRequest, Body(openapi_examples=simulation_examples())],
        principal: CurrentPrincipal,
    ) -> Response:
        """What a split would cost: other cuts, devices or options than a plan has."""
        found = await planning.simulate(principal, body)
        return Response(found.model_dump_json(), media_type="application/json")

    @router.post("/comparisons")
    async def compare(
        body: Annotated[ComparisonRequest, Body(openapi_examples=comparison_examples())],
        principal: CurrentPrincipal,
    ) -> Comparison:
        """Two to eight stored plans side by side."""
        return await planning.compare(principal, body)

    return router
