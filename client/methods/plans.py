"""Plans: making, reading, exporting and comparing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from ...core.cluster.cluster import Cluster
from ...core.plan.plan import PlanOptions
from ...core.plan.schedule import Schedule
from ...core.plan.timeline import Timeline
from ...core.requests.requests import EstimateOptions, ProfilingOptions
from ...core.service.documents import Comparison, PlanList, PlanSummary, Simulation, StoredPlan
from ...core.service.jobs import JobView
from ..model_sources import ModelLike, describe_model
from ..progress import Progress
from ..request_builders import build_create, build_delete, build_get, build_query, drop_none
from ..retry import ask, delete, send_with_retries
from ..sans_io import HttpReply, Steps
from .jobs import wait

PROMPT_S = 2
"""Seconds the service waits for a measurement before it answers with a job (``Prefer: wait``):
enough for a cached answer, and little enough for progress to be shown soon."""


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
    """Plan a model's pipeline stages on the service; an infeasible request is also an answer.

    Args:
        model: An ``nn.Module``, or the path of a ``.pt2`` file, which is captured on this machine:
            its graph is sent, without weights or code. Or a `Graph`; one or several `Profile`; a
            family (``{"family": "gpt2"}``), a Hugging Face config (``config.to_dict()``) or the
            name of a published model; a stored profile or graph, or its id; the path of a
            ``.json`` with a graph or profile. If the service accepts them, a `FactoryCall`.
        sample: For a module, the inputs of one micro-batch: a tensor, a tuple or a dict. For a
            family, a `Sample`.
        cluster: Devices and links, or shorthand such as ``4x24GB``.
        options: Objective, schedule and constraints.
        estimate: The accelerator to estimate costs for, or `EstimateOptions`; a family is
            estimated unless ``profiling`` is given.
        profiling: Have the service measure the model, with these settings.
        deadline_s: Longest time to estimate the model and to search; `None` for the service's
            limits.
        fresh: Bypass the service's caches.
        wait_s: Longest time to wait for a measurement; `None` for no limit.
        progress: Show a measurement's progress on a terminal, or a callback for its events.

    Raises:
        InvalidInput: A field is invalid; ``field`` points at it.
        CaptureError: The module cannot be captured, or not without its code.
        DeadlineExceeded: There was no plan in time; a measurement continues as a job.
        Refused: The token does not permit it.
        Unreachable: The service cannot be reached.
    """
    source = describe_model(model, sample)
    if isinstance(estimate, str):
        estimate = EstimateOptions(device=estimate)
    fields = {
        **source,
        **drop_none(cluster=cluster, options=options, estimate=estimate, profiling=profiling),
        **drop_none(deadline_s=deadline_s),
    }
    call = build_create("plans", fields=fields, fresh=fresh, headers={"Prefer": f"wait={PROMPT_S}"})
    reply = yield from send_with_retries(call)
    if reply.status != 202:
        return _answer(reply)
    job = reply.read(JobView)
    job = yield from wait(job, timeout_s=wait_s, progress=progress)
    assert job.result is not None, "a job that succeeded has a result"
    return _answer((yield from send_with_retries(build_get("plans", job.result.id))))


def _answer(reply: HttpReply) -> PlanAnswer:
    answer = reply.read(PlanAnswer)
    reused = reply.headers.get("stagewright-reused")
    return answer.model_copy(update={"reused": reused if reused in ("plan", "profile") else None})


def get_plan(plan_id: str) -> Steps[StoredPlan]:
    """Return a stored plan with the request it answers."""
    return (yield from ask(build_get("plans", plan_id), StoredPlan))


def plans(*, limit: int | None = None, cursor: str | None = None) -> Steps[PlanList]:
    """List stored plans, newest first; pass ``next_cursor`` as ``cursor`` for the next page."""
    return (yield from ask(build_get("plans", limit=limit, cursor=cursor), PlanList))


class LabelChanges(TypedDict, total=False):
    """Labels of a plan to be changed."""

    name: str | None
    tags: Sequence[str]
    notes: str | None


def label_plan(plan_id: str, **labels: Unpack[LabelChanges]) -> Steps[PlanSummary]:
    """Change a plan's ``name``, ``tags`` or ``notes``; labels not given stay as they are."""
    call = build_query("plans", plan_id, fields=labels, method="PATCH")
    return (yield from ask(call, PlanSummary))


def delete_plan(plan_id: str) -> Steps[None]:
    """Delete a plan; its profile stays."""
    yield from delete(build_delete("plans", plan_id))


def schedule(plan_id: str) -> Steps[Schedule]:
    """Return the order of work of every rank.

    Raises:
        InvalidInput: The request was infeasible, so there is no schedule.
    """
    return (yield from ask(build_get("plans", plan_id, format="schedule"), Schedule))


def timeline(plan_id: str) -> Steps[Timeline]:
    """Return the simulated start and end of every action of a step.

    Raises:
        InvalidInput: The request was infeasible, so there is no timeline.
    """
    return (yield from ask(build_get("plans", plan_id, format="timeline"), Timeline))


def export(plan_id: str, format: Literal["plan", "svg", "chrome_trace"] = "plan") -> Steps[str]:
    """Return a plan as the text of a file: its JSON document, a drawing, or a Chrome trace."""
    call = build_get("plans", plan_id, format=format)
    return (yield from send_with_retries(call)).body.decode()


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
    """Price a given split, without searching or storing anything.

    Args:
        plan_id: A stored plan, which supplies whatever else is not given.
        profile_id: A stored profile instead of a plan.
        profile: A `Profile` instead of a plan.
        balance: Number of layers of each stage.
        replicas: Number of devices of each stage.
        cluster: Devices and links, or shorthand.
        options: Objective, schedule and constraints.
        timeline: Also return the start and end of every action.
    """
    fields = drop_none(
        plan_id=plan_id,
        profile_id=profile_id,
        profile=profile,
        balance=balance,
        replicas=replicas,
        cluster=cluster,
        options=options,
    )
    call = build_query("simulations", fields={**fields, "timeline": timeline})
    return (yield from ask(call, Simulation))


def compare(*plans: str | StoredPlan) -> Steps[Comparison]:
    """Compare two to eight stored plans, given as plans or by their ids."""
    fields = {"plan_ids": [getattr(entry, "id", entry) for entry in plans]}
    return (yield from ask(build_query("comparisons", fields=fields), Comparison))


class PlanAnswer(StoredPlan):
    """A stored plan, or the reason why there is none.

    Attributes:
        reused: The part that came from the service's cache: the whole plan, or the profile.
    """

    reused: Literal["plan", "profile"] | None = None
