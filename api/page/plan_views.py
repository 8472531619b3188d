"""What a page needs of a stored plan, and of the same plan changed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from starlette.concurrency import run_in_threadpool

from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...core.service.plans import InfeasibleAnswer, StoredPlan
from ...view.build_plan_view import MAX_ACTIONS, build_plan_view
from ...view.html import data
from ...view.plan_view import GraphView, LayerColumns, PlanView
from ..auth.principal import Principal
from ..planning.exports import plan_of
from ..planning.requests import ClusterInput
from ..planning.service import Planning
from ..planning.what_if import PricedSplit, SimulationRequest, price
from ..routes.dependencies import from_state
from ..store.store import Store
from .slider_choices import choices_of


class ViewRequest(Record):
    """A stored plan with changes, to be looked at; nothing is searched or stored.

    Attributes:
        plan_id: The stored plan.
        balance: Layers of each stage instead of its own.
        cluster: Devices instead of its own.
        options: Options instead of its own.
        step: Whether to answer with the boxes and curves of a step, too; lanes are idle without.
        layers: Whether to answer with the layers and the folded graph, too.
    """

    plan_id: str = Field(max_length=80)
    balance: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] | None = Field(
        None, min_length=1, max_length=4096
    )
    cluster: ClusterInput | None = None
    options: PlanOptions | None = None
    step: bool = True
    layers: bool = True


MAX_KEPT_CHARACTERS = 64 * 2**20
"""Of drawings that are kept; the largest has 9 million."""


class Views:
    """Looks at stored plans.

    A plan never changes, so what was drawn of it is kept for whoever asks next.

    Args:
        planning: Prices changed plans, and draws where they are searched for.
        store: Has plans and profiles.
    """

    def __init__(self, planning: Planning, store: Store) -> None:
        self._planning = planning
        self._store = store
        self._kept: OrderedDict[tuple[str, str, bool], Drawing] = OrderedDict()

    async def stored(self, principal: Principal, plan_id: str) -> Drawing:
        """A plan as it is kept, with its step.

        Raises:
            NotFound, Problem: There is none under that id, or nothing fitted its request.
        """
        found = await run_in_threadpool(self._store.documents.plan, principal.project_id, plan_id)
        return await self.of(principal, found, with_step=True)

    async def of(self, principal: Principal, stored: StoredPlan, *, with_step: bool) -> Drawing:
        """The same of a record that is read already."""
        key = principal.project_id, stored.id, with_step
        found = self._kept.get(key)
        if found is None:
            plan = plan_of(stored)
            profile = await run_in_threadpool(
                self._store.documents.profile, principal.project_id, stored.profile_id
            )
            found = await self._planning.run_in_solver(
                drawing, plan, profile.profile, stored.cluster, with_step
            )
            self._kept[key] = found
        self._kept.move_to_end(key)
        while sum(len(one.text) for one in self._kept.values()) > MAX_KEPT_CHARACTERS:
            self._kept.popitem(last=False)
        return found

    async def changed(self, principal: Principal, request: ViewRequest) -> str:
        """A plan with changes, priced as ``POST /v1/simulations`` does: a `ViewAnswer` as JSON.

        What is no split of that profile, or has options that do not go together, is an answer too.

        Raises:
            NotFound, Problem: There is no such plan, or nothing fitted its request.
        """
        stored = await run_in_threadpool(
            self._store.documents.plan, principal.project_id, request.plan_id
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
        )
        try:
            split = await self._planning.resolve_split(principal, asked)
            return await self._planning.run_in_solver(
                changed_view, split, request.step, request.layers
            )
        except InvalidInput as error:
            return ViewAnswer(status="refused", refused=str(error)).model_dump_json()


TheViews = Annotated[Views, from_state("views")]

LARGE_STEP = 10_000
"""Actions of all ranks. A page shows the step of more of them after everything else."""

StepPlace = Literal["here", "follows", "never"]


class ViewAnswer(Record):
    """The changed plan, or why it cannot be used.

    Attributes:
        status: ``refused`` for what no simulator prices: cuts, options and schedule do not go
            together, or are too much for this server.
        refused: Why, and what to change.
    """

    status: Literal["simulated", "infeasible", "refused"]
    view: PlanView | None = None
    infeasible: InfeasibleAnswer | None = None
    refused: str = ""


class Drawing(NamedTuple):
    """A plan as pages have it.

    Attributes:
        text: The `PlanView` as JSON that an HTML data block can hold, whole or without its step.
        shown: The same without what the program alone draws: boxes, curves, layers and graph.
        choices: Schedules it may be changed to, as JSON has them.
    """

    text: str
    shown: PlanView
    choices: dict[str, dict[str, Any]]


def place_of_step(plan: Plan) -> StepPlace:
    """Whether a page brings the step along, asks for it when the rest is shown, or has none."""
    actions = 2 * plan.num_stages * plan.num_microbatches
    if actions > MAX_ACTIONS:
        return "never"
    return "follows" if actions > LARGE_STEP else "here"


def drawing(plan: Plan, profile: Profile, cluster: Cluster, with_step: bool) -> Drawing:
    """What pages have of a plan."""
    view = build_plan_view(plan, profile, cluster, with_step=with_step)
    layers = LayerColumns(names=(), stages=())
    left_out = {"boxes": None, "memory": (), "layers": layers, "graph": GraphView()}
    choices = choices_of(plan, profile, cluster)
    return Drawing(
        text=str(data(view)),
        shown=view.model_copy(update=left_out),
        choices={name: choice.model_dump(mode="json") for name, choice in choices.items()},
    )


def changed_view(split: PricedSplit, with_step: bool, with_layers: bool) -> str:
    """A `ViewAnswer` as JSON.

    Raises:
        InvalidInput: It is no split of those layers.
    """
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
