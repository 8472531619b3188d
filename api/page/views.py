"""What a page needs of a stored plan, and of the same plan changed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from ...core.cluster import Cluster
from ...core.document import Record
from ...core.plan import PlanOptions
from ...core.service.plans import InfeasibleAnswer, StoredPlan
from ...view.of_plan import plan_view
from ...view.plan_view import PlanView
from ..auth.caller import Caller
from ..drawing import plan_of
from ..requests import ClusterInput
from ..services import Planning
from ..store.contract import Store
from ..what_if import SimulationRequest


class ViewRequest(Record):
    """A stored plan with changes, to be looked at; nothing is searched or stored.

    Attributes:
        plan_id: The stored plan.
        balance: Layers of each stage instead of its own.
        cluster: Devices instead of its own.
        options: Options instead of its own.
    """

    plan_id: str = Field(max_length=80)
    balance: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] | None = Field(
        None, min_length=1, max_length=4096
    )
    cluster: ClusterInput | None = None
    options: PlanOptions | None = None


class ViewAnswer(Record):
    """The changed plan, or why it cannot be used."""

    status: Literal["simulated", "infeasible"]
    view: PlanView | None = None
    infeasible: InfeasibleAnswer | None = None


class Views:
    """Looks at stored plans.

    Args:
        planning: Prices changed plans.
        store: Has plans and profiles.
    """

    def __init__(self, planning: Planning, store: Store) -> None:
        self._planning = planning
        self._store = store

    def stored(self, caller: Caller, plan_id: str) -> PlanView:
        """A plan as it is kept.

        Raises:
            NotFound, Problem: There is none under that id, or nothing fitted its request.
        """
        return self.of(caller, self._store.documents.plan(caller.project_id, plan_id))

    def of(self, caller: Caller, stored: StoredPlan) -> PlanView:
        """The same of a record that is read already."""
        profile = self._store.documents.profile(caller.project_id, stored.profile_id).profile
        return plan_view(plan_of(stored), profile, stored.cluster)

    async def changed(self, caller: Caller, request: ViewRequest) -> ViewAnswer:
        """A plan with changes, priced as ``POST /v1/simulations`` does.

        Raises:
            InvalidInput: It is no split of that profile, or options that do not go together.
            NotFound: There is no such plan.
        """
        stored = await run_in_threadpool(
            self._store.documents.plan, caller.project_id, request.plan_id
        )
        plan = plan_of(stored)
        balance = request.balance or plan.balance
        same_stages = len(balance) == plan.num_stages
        asked = SimulationRequest(
            plan_id=request.plan_id,
            balance=balance,
            replicas=tuple(stage.replicas for stage in plan.stages) if same_stages else None,
            cluster=request.cluster,
            options=request.options,
            timeline=True,
        )
        found = await self._planning.simulate(caller, asked)
        if found.plan is None:
            return ViewAnswer(status="infeasible", infeasible=found.infeasible)
        cluster: Cluster = request.cluster or stored.cluster
        profile = await run_in_threadpool(
            self._store.documents.profile, caller.project_id, stored.profile_id
        )
        view = await run_in_threadpool(
            plan_view, found.plan, profile.profile, cluster, timeline=found.timeline
        )
        return ViewAnswer(status="simulated", view=view)
