"""Plans: making, reading, drawing and comparing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...core.cluster.cluster import Cluster
from ...core.plan.plan import PlanOptions
from ...core.plan.schedule import Schedule
from ...core.plan.timeline import Timeline
from ...core.requests.requests import EstimateOptions, ProfilingOptions
from ...core.service.documents import PlanList
from ...core.service.jobs import JobView
from ...core.service.plans import StoredPlan
from ...core.service.what_if import Comparison, Simulation
from ..model_sources import ModelLike
from ..progress import Progress
from ..request_builders import ask, create, get, given
from ..retry import exchange
from ..sans_io import Reply, Steps
from .documents import model_fields
from .jobs import wait

PROMPT_S = 2
"""How long the service is to wait for a measurement before it answers with the job instead: long
enough for what it knows already, and short enough for its progress to be seen."""


def plan(
    model: ModelLike,
    sample: Any = None,
    *,
    cluster: Cluster | str,
    options: PlanOptions | Mapping[str, Any] | None = None,
    estimate: EstimateOptions | Mapping[str, Any] | str | None = None,
    profiling: ProfilingOptions | Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
    fresh: bool = False,
    wait_s: float | None = None,
    progress: Progress = True,
) -> Steps[PlanAnswer]:
    """Plan a model's pipeline stages on the service; infeasible is an answer.

    Args:
        model: An ``nn.Module``, which is captured here: its graph is sent, no weights and no
            code. Or a `Graph`; a `Profile` or several; a family (``{"family": "gpt2"}``) or the
            name of a published model; a stored profile or graph, or its id; the path of a
            ``.pt2`` file, or of a ``.json`` with a graph or profile. Where the service takes
            them, a `FactoryCall` or `ModelCode`.
        sample: Of a module, the inputs of one micro-batch: a tensor, a tuple or a dict. Of a
            family, a `Sample`.
        cluster: Devices and links, or shorthand such as ``4x24GB``.
        options: What to plan for.
        estimate: The catalogue's device to estimate for, or more; a family is estimated unless
            ``profiling`` is given.
        profiling: Have the model measured by the service, and how.
        deadline_s: Longest to search; the service's own limit if `None`.
        fresh: Have everything found out again, whatever the service knows.
        wait_s: Longest to wait for a measurement; `None` as long as it takes.
        progress: Show a measurement's progress on a terminal, or what to call for its events.

    Raises:
        InvalidInput: A field does not fit; ``field`` points at it.
        CaptureError: The module cannot be captured, or only with its code.
        DeadlineExceeded: There was no plan in time; a measurement goes on as a job.
        Refused: The token may not.
        Unreachable: The service does not answer.
    """
    source = yield from model_fields(model, sample)
    if isinstance(estimate, str):
        estimate = EstimateOptions(device=estimate)
    if "model" in source and estimate is None and profiling is None:
        estimate = EstimateOptions()
    fields = {
        **source,
        **given(cluster=cluster, options=options, estimate=estimate, profiling=profiling),
        **given(deadline_s=deadline_s),
    }
    call = create("plans", fields=fields, fresh=fresh, headers={"Prefer": f"wait={PROMPT_S}"})
    reply = yield from exchange(call)
    if reply.status != 202:
        return _answer(reply)
    job = reply.read(JobView)
    job = yield from wait(job, timeout_s=wait_s, progress=progress)
    assert job.result is not None, "a job that succeeded has a result"
    return _answer((yield from exchange(get("plans", job.result.id))))


def _answer(reply: Reply) -> PlanAnswer:
    answer = reply.read(PlanAnswer)
    reused = reply.headers.get("stagewright-reused")
    return answer.model_copy(update={"reused": reused if reused in ("plan", "profile") else None})


def get_plan(plan_id: str) -> Steps[StoredPlan]:
    """A stored plan with the request it answers.

    Raises:
        NotFound: There is none.
    """
    return (yield from exchange(get("plans", plan_id))).read(StoredPlan)


def plans(*, limit: int | None = None, cursor: str | None = None) -> Steps[PlanList]:
    """Stored plans, newest first; ``next_cursor`` goes into ``cursor`` for the next page."""
    call = get("plans", limit=limit, cursor=cursor)
    return (yield from exchange(call)).read(PlanList)


def schedule(plan_id: str) -> Steps[Schedule]:
    """The order of work of every rank.

    Raises:
        InvalidInput: Nothing fitted the request of that plan, so it has no schedule.
    """
    call = get("plans", plan_id, "schedule")
    return (yield from exchange(call)).read(Schedule)


def timeline(plan_id: str) -> Steps[Timeline]:
    """When every action of a step happens, as simulated.

    Raises:
        InvalidInput: Nothing fitted the request of that plan, so it has no timeline.
    """
    call = get("plans", plan_id, "timeline")
    return (yield from exchange(call)).read(Timeline)


def export(plan_id: str, format: Literal["plan", "svg", "chrome_trace"] = "plan") -> Steps[str]:
    """The plan as text of a file: for the command line, as a drawing, or as a trace."""
    call = get("plans", plan_id, "export", format=format)
    return (yield from exchange(call)).body.decode()


def simulate(
    *,
    plan_id: str | None = None,
    profile_id: str | None = None,
    profile: Any = None,
    balance: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    cluster: Cluster | str | None = None,
    options: PlanOptions | Mapping[str, Any] | None = None,
    timeline: bool = False,
) -> Steps[Simulation]:
    """What a split costs; nothing is searched and nothing is stored.

    Args:
        plan_id: A stored plan: its profile, cluster, options and split, where nothing else is
            given.
        profile_id: A stored profile instead.
        profile: A `Profile` instead.
        balance: Layers of each stage.
        replicas: Devices of each stage.
        cluster: The devices.
        options: What to plan for.
        timeline: Whether to answer with when everything starts and ends, too.
    """
    fields = given(
        plan_id=plan_id,
        profile_id=profile_id,
        profile=profile,
        balance=balance,
        replicas=replicas,
        cluster=cluster,
        options=options,
    )
    call = ask("simulations", fields={**fields, "timeline": timeline})
    return (yield from exchange(call)).read(Simulation)


def compare(*plans: str | StoredPlan) -> Steps[Comparison]:
    """Two to eight stored plans side by side, by their ids or as they were answered."""
    fields = {"plan_ids": [getattr(entry, "id", entry) for entry in plans]}
    call = ask("comparisons", fields=fields)
    return (yield from exchange(call)).read(Comparison)


class PlanAnswer(StoredPlan):
    """A plan as stored, or why there is none.

    Attributes:
        reused: What the service had found out before: this very plan, or the model's costs.
    """

    reused: Literal["plan", "profile"] | None = None
