"""Views of stored plans, also with changes, as plan pages draw them, and their routes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Body, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from ... import __version__
from ...core.cluster.cluster import Cluster
from ...core.cluster.shorthand import format_devices
from ...core.document import NonEmptyTuple, Record
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...core.service.documents import InfeasibleAnswer, StoredPlan
from ...view.build_plan_view import MAX_ACTIONS, build_plan_view
from ...view.html import data
from ...view.plan_view import GraphView, LayerColumns, PlanView
from ..auth.access import CurrentPrincipal, Principal
from ..http.strict_requests import StrictRoute
from ..planning.exports import plan_of
from ..planning.requests import ClusterInput
from ..planning.service import Planning
from ..planning.what_if import PricedSplit, SimulationRequest, price
from ..routes.dependencies import TheReading, from_state
from ..store.store import Store
from .plan_names import name_plan
from .slider_choices import choices_of


class ViewRequest(Record):
    """Request for the view of a stored plan with changes; nothing is searched or stored.

    Attributes:
        plan_id: The stored plan.
        balance: Layers of each stage instead of its own.
        cluster: Devices instead of its own.
        options: Options instead of its own.
        step: Whether to include the boxes and curves of a step; lanes are empty without.
        layers: Whether to include the layers and the folded graph.
    """

    plan_id: str = Field(max_length=80)
    balance: NonEmptyTuple[Annotated[int, Field(ge=1, le=2**20)]] | None = Field(
        None, max_length=4096
    )
    cluster: ClusterInput | None = None
    options: PlanOptions | None = None
    step: bool = True
    layers: bool = True


MAX_KEPT_CHARACTERS = 64 * 2**20
"""Size of the cache of drawings; the largest drawing has 9 million characters."""


class Views:
    """Cache of drawings of stored plans, which never change."""

    def __init__(self, planning: Planning, store: Store) -> None:
        self._planning = planning
        self._store = store
        self._kept: OrderedDict[tuple[str, str, bool], Drawing] = OrderedDict()

    async def stored(self, principal: Principal, plan_id: str) -> Drawing:
        """Draw a stored plan with its step."""
        found = await run_in_threadpool(self._store.documents.plan, principal.project_id, plan_id)
        return await self.of(principal, found, with_step=True)

    async def of(self, principal: Principal, stored: StoredPlan, *, with_step: bool) -> Drawing:
        """Draw a record that has been read, with its step or without."""
        key = principal.project_id, stored.id, with_step
        found = self._kept.get(key)
        if found is None:
            plan = plan_of(stored)
            profile = await run_in_threadpool(
                self._store.documents.profile, principal.project_id, stored.profile_id
            )
            found = await self._planning.run_in_solver(
                principal, drawing, plan, profile.profile, stored.cluster, with_step
            )
            self._kept[key] = found
        # Least recently used first; the size is bounded, since drawings differ a thousandfold.
        self._kept.move_to_end(key)
        while sum(len(one.text) for one in self._kept.values()) > MAX_KEPT_CHARACTERS:
            self._kept.popitem(last=False)
        return found

    async def changed(self, principal: Principal, request: ViewRequest) -> str:
        """Price a plan with changes and return a `ViewAnswer` as JSON.

        An impossible split and contradicting options get an answer with the status ``refused``.
        """
        stored = await run_in_threadpool(
            self._store.documents.plan, principal.project_id, request.plan_id
        )
        plan = plan_of(stored)
        balance = request.balance or plan.balance
        # With another number of stages the plan's replicas mean nothing; each stage then has one.
        same_stages = len(balance) == plan.num_stages
        asked = SimulationRequest(
            plan_id=request.plan_id,
            balance=balance,
            replicas=tuple(stage.replicas for stage in plan.stages) if same_stages else None,
            cluster=request.cluster,
            options=request.options,
        )
        try:
            split = await self._planning.resolve_split(principal, asked)
            return await self._planning.run_in_solver(
                principal, changed_view, split, request.step, request.layers
            )
        except InvalidInput as error:
            return ViewAnswer(status="refused", refused=str(error)).model_dump_json()


TheViews = Annotated[Views, from_state("views")]

LARGE_STEP = 10_000
"""Actions of all ranks. A page loads larger steps after everything else."""

StepPlace = Literal["here", "follows", "never"]


class ViewAnswer(Record):
    """View of the changed plan, or the reason why there is none.

    Attributes:
        status: ``refused`` if cuts, options and schedule contradict each other, or exceed this
            server's limits.
        refused: The reason, and what to change.
    """

    status: Literal["simulated", "infeasible", "refused"]
    view: PlanView | None = None
    infeasible: InfeasibleAnswer | None = None
    refused: str = ""


class Drawing(NamedTuple):
    """Data of a plan's page.

    Attributes:
        text: The `PlanView` as JSON for an HTML data block, with its step or without.
        shown: The `PlanView` for the template, without what scripts draw: boxes, curves, layers
            and graph.
        choices: Schedules the plan may be changed to, as JSON objects.
        name: What the plan is called unless somebody names it.
    """

    text: str
    shown: PlanView
    choices: dict[str, dict[str, Any]]
    name: str


def place_of_step(plan: Plan) -> StepPlace:
    """Return whether a page includes the step, loads it after the rest, or has none."""
    actions = 2 * plan.num_stages * plan.num_microbatches
    if actions > MAX_ACTIONS:
        return "never"
    return "follows" if actions > LARGE_STEP else "here"


def drawing(plan: Plan, profile: Profile, cluster: Cluster, with_step: bool) -> Drawing:
    """Draw a plan (the name is a label of the metrics)."""
    view = build_plan_view(plan, profile, cluster, with_step=with_step)
    layers = LayerColumns(names=(), stages=())
    left_out = {"boxes": None, "memory": (), "layers": layers, "graph": GraphView()}
    choices = choices_of(plan, profile, cluster)
    return Drawing(
        text=str(data(view)),
        shown=view.model_copy(update=left_out),
        choices={name: choice.model_dump(mode="json") for name, choice in choices.items()},
        name=name_plan(plan, profile, format_devices(cluster)),
    )


def changed_view(split: PricedSplit, with_step: bool, with_layers: bool) -> str:
    """Price a split and return a `ViewAnswer` as JSON (the name is a label of the metrics)."""
    found = price(split, False)
    if found.plan is None:
        answer = ViewAnswer(status="infeasible", infeasible=found.infeasible)
    else:
        view = build_plan_view(
            found.plan,
            split.profile,
            split.cluster,
            with_step=with_step,
            with_layers=with_layers,
            searched=False,
        )
        answer = ViewAnswer(status="simulated", view=view)
    return answer.model_dump_json()


router = APIRouter(prefix="/v1", route_class=StrictRoute, include_in_schema=False)


@router.get("/plans/{plan_id}/view")
async def get_view(views: TheViews, plan_id: str, reading: TheReading) -> Response:
    """Return a plan's numbers, layers, boxes, memory curves and folded graph, ready to draw."""
    found = await views.stored(reading.principal, plan_id)
    return reading.respond(f"{plan_id}.view.{__version__}", found.text)


@router.post("/views")
async def change_view(
    views: TheViews, body: Annotated[ViewRequest, Body()], principal: CurrentPrincipal
) -> Response:
    """Return the view of a stored plan with other cuts, devices or options; stores nothing."""
    return Response(await views.changed(principal, body), media_type="application/json")
