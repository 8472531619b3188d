"""What is drawn of a plan, made in a planning process: a large one takes a second."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.plan.plan import Plan
from ...core.profile.profile import Profile
from ...core.service.plans import InfeasibleAnswer
from ...view.build_plan_view import MAX_ACTIONS, plan_view
from ...view.html import data
from ...view.plan_view import GraphView, LayerColumns, PlanView
from ..planning.what_if import PricedSplit, price
from .slider_choices import choices_of

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
    view = plan_view(plan, profile, cluster, with_step=with_step)
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
        view = plan_view(
            found.plan,
            split.profile,
            split.cluster,
            with_step=with_step,
            with_layers=with_layers,
            searched=False,
        )
        answer = ViewAnswer(status="simulated", view=view)
    return answer.model_dump_json()
