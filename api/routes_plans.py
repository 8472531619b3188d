"""``/v1/plans``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Response

from .auth.caller import CallerOfRequest
from .examples import plan_examples
from .json_body import StrictRoute
from .openapi import PROBLEM_RESPONSE
from .records import PlanList, StoredPlan
from .requests import PlanRequest
from .services import Planning
from .store.contract import Store


def plan_routes(planning: Planning, store: Store) -> APIRouter:
    """Routes that make and read plans."""
    router = APIRouter(
        prefix="/v1/plans", tags=["plans"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.post("", status_code=201)
    async def create_plan(
        request: Annotated[PlanRequest, Body(openapi_examples=plan_examples())],
        response: Response,
        caller: CallerOfRequest,
    ) -> StoredPlan:
        """Plan a model's pipeline stages, measuring the model first if no profile is given.

        That nothing fits is an answer too: its status is ``infeasible``. If no plan was found
        before ``deadline_s`` and none was proven impossible, the answer is a problem of type
        ``deadline-exceeded`` with status 504; ask for less, or allow more time.
        """
        stored = await planning.create_plan(caller, request)
        response.headers["Location"] = f"/v1/plans/{stored.id}"
        return stored

    @router.get("")
    def list_plans(
        caller: CallerOfRequest, limit: Annotated[int, Query(ge=1, le=500)] = 50
    ) -> PlanList:
        """The latest plans, newest first."""
        return PlanList(plans=store.documents.plans(caller.project_id, limit=limit).items)

    @router.get("/{plan_id}")
    def get_plan(plan_id: str, caller: CallerOfRequest) -> StoredPlan:
        """A plan with the request it answers."""
        return store.documents.plan(caller.project_id, plan_id)

    return router
