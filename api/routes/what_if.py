"""``/v1/simulations`` and ``/v1/comparisons``: questions about plans; nothing is stored."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Response

from ..auth.access import CurrentPrincipal
from ..http.examples import COMPARISON_EXAMPLES, SIMULATION_EXAMPLES
from ..http.problems import PROBLEM_RESPONSE
from ..http.strict_requests import StrictRoute
from ..planning.what_if import Comparison, ComparisonRequest, Simulation, SimulationRequest
from .dependencies import ThePlanning

router = APIRouter(
    prefix="/v1", tags=["what if"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
)


@router.post("/simulations", response_model=Simulation)
async def simulate(
    planning: ThePlanning,
    body: Annotated[SimulationRequest, Body(openapi_examples=SIMULATION_EXAMPLES)],
    principal: CurrentPrincipal,
) -> Response:
    """Simulate a given split: other cuts, devices or options than a plan has."""
    found = await planning.simulate(principal, body)
    # Serialized here: FastAPI would validate a timeline of 100,000 actions a second time.
    return Response(found.model_dump_json(), media_type="application/json")


@router.post("/comparisons")
async def compare(
    planning: ThePlanning,
    body: Annotated[ComparisonRequest, Body(openapi_examples=COMPARISON_EXAMPLES)],
    principal: CurrentPrincipal,
) -> Comparison:
    """Compare two to eight stored plans."""
    return await planning.compare(principal, body)
