"""What the service does, free of HTTP: measure if asked, plan, keep both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from starlette.concurrency import run_in_threadpool

from ..core.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.graph import Graph
from ..core.options import EstimateOptions, EstimateRequest
from ..core.plan import PlanOptions
from ..core.profile import Profile
from ..planner.plan import plan
from .auth.caller import Caller
from .digests import estimate_digest, plan_digest
from .effort import check_effort
from .measuring import Measurer
from .models.estimating import Estimator
from .models.limits import check_graph, check_rebuilt
from .records import PlanRecord, StoredPlan, infeasible_answer
from .requests import PlanRequest
from .solving import Solver
from .store.contract import Store
from .store.errors import NotFound
from .store.records import Stored
from .what_if import (
    Comparison,
    ComparisonRequest,
    Simulation,
    SimulationRequest,
    compare,
    simulate,
)


@dataclass(frozen=True)
class Answered:
    """A plan, and what of it had been found out before.

    Attributes:
        reused: ``plan`` if the very request had been answered, ``profile`` if the model's costs
            were known; `None` if everything is new.
    """

    stored: StoredPlan
    reused: Literal["plan", "profile"] | None = None


class Planning:
    """Answers planning requests.

    Args:
        store: Where profiles and answers are kept.
        measurer: What measures a model that comes without a profile.
        estimator: What estimates one.
        solver: Where plans are searched for.
        deadline_s: Longest one request may search for a plan.
    """

    def __init__(
        self,
        store: Store,
        measurer: Measurer,
        estimator: Estimator,
        solver: Solver,
        *,
        deadline_s: float,
    ) -> None:
        self._store = store
        self._measurer = measurer
        self._estimator = estimator
        self._solver = solver
        self._deadline_s = deadline_s

    async def create_plan(
        self, caller: Caller, request: PlanRequest, *, fresh: bool = False
    ) -> Answered:
        """Plan, and keep the request with its answer; infeasible is an answer.

        Planning and storing run elsewhere: the event loop stays free.

        Args:
            caller: Whose project it is kept in.
            request: What is asked.
            fresh: Find everything out again, whatever is known.

        Raises:
            InvalidInput: The request makes no sense together, asks for more than this service
                does, or for more time than it gives.
            DeadlineExceeded: No plan was found in time, and none was proven impossible.
            Problem: 403: it asks for a measurement, which the caller may not.
            StagewrightError: Measuring or estimating failed.
        """
        deadline_s = self._deadline(request)
        if request.measure_request() is not None:
            caller.require("measure", "measuring a model")
        digest = plan_digest(request, deadline_s)
        project = caller.project_id
        if not fresh:
            known = await run_in_threadpool(self._known_plan, project, digest)
            if known is not None:
                return Answered(known, "plan")
        profiles, cluster, known_profile = await self._profiles(project, request, fresh)
        check_effort(profiles, cluster, request.options)
        record = await self._solver.run(decide, profiles, cluster, request.options, deadline_s)
        stored = await run_in_threadpool(self._keep, project, digest, record)
        return Answered(stored, "profile" if known_profile else None)

    async def create_profile(self, project_id: str, profile: Profile) -> Stored:
        """Keep a profile."""
        return await run_in_threadpool(self._store.documents.put_profile, project_id, profile)

    async def create_graph(self, project_id: str, graph: Graph) -> Stored:
        """Keep a graph.

        Raises:
            InvalidInput: It is too large for this service.
        """
        check_graph(graph)
        return await run_in_threadpool(self._store.documents.put_graph, project_id, graph)

    async def simulate(self, caller: Caller, request: SimulationRequest) -> Simulation:
        """Price a split somebody chose; nothing is stored.

        Raises:
            InvalidInput: It is no split of that profile, or larger than this service does.
        """
        profile, base = await run_in_threadpool(self._base, caller.project_id, request)
        plan_of_base = None if base is None else base.plan
        cluster = request.cluster or (base.cluster if base else None)
        options = request.options or (base.options if base else PlanOptions())
        balance, replicas = request.balance, request.replicas or ()
        if balance is None and plan_of_base is not None:
            balance = plan_of_base.balance
            replicas = tuple(stage.replicas for stage in plan_of_base.stages)
        if balance is None or cluster is None:
            raise InvalidInput(
                "nothing fitted the request of that plan, so it has no split; give a 'balance'",
                field="/balance",
            )
        check_effort([profile], cluster, options)
        return await self._solver.run(
            simulate, profile, cluster, options, balance, tuple(replicas), request.timeline
        )

    async def compare(self, caller: Caller, request: ComparisonRequest) -> Comparison:
        """Put stored plans side by side.

        Raises:
            InvalidInput: One of them is not stored.
        """
        return compare(await run_in_threadpool(self._named_plans, caller.project_id, request))

    def _named_plans(self, project: str, request: ComparisonRequest) -> tuple[StoredPlan, ...]:
        found = []
        for position, plan_id in enumerate(request.plan_ids):
            with _pointing_at(f"/plan_ids/{position}"):
                found.append(self._store.documents.plan(project, plan_id))
        return tuple(found)

    def _base(self, project: str, request: SimulationRequest) -> tuple[Profile, StoredPlan | None]:
        documents = self._store.documents
        if request.profile is not None:
            return request.profile, None
        if request.profile_id is not None:
            with _pointing_at("/profile_id"):
                return documents.profile(project, request.profile_id).profile, None
        assert request.plan_id is not None, "a SimulationRequest has one base"
        with _pointing_at("/plan_id"):
            base = documents.plan(project, request.plan_id)
            return documents.profile(project, base.profile_id).profile, base

    def _deadline(self, request: PlanRequest) -> float:
        if request.deadline_s is None:
            return self._deadline_s
        if request.deadline_s > self._deadline_s:
            raise InvalidInput(
                f"this server searches for at most {self._deadline_s:g} s, not "
                f"{request.deadline_s:g} s; ask for less, or plan with the library",
                field="/deadline_s",
            )
        return request.deadline_s

    def _known_plan(self, project: str, digest: str) -> StoredPlan | None:
        found = self._store.reuse.recall(project, "plan", digest)
        return None if found is None else self._store.documents.plan(project, found)

    def _keep(self, project: str, digest: str, record: PlanRecord) -> StoredPlan:
        stored = self._store.documents.put_plan(project, record)
        self._store.reuse.remember(project, "plan", digest, stored.id)
        return stored

    async def _profiles(
        self, project: str, request: PlanRequest, fresh: bool
    ) -> tuple[tuple[Profile, ...], Cluster, bool]:
        """The profiles to plan from, stored; the cluster; whether the costs were known."""
        known = False
        cluster = request.cluster
        if request.profile_id is not None:
            with _pointing_at("/profile_id"):
                found = await run_in_threadpool(
                    self._store.documents.profile, project, request.profile_id
                )
            return (found.profile,), cluster, False
        measure_request = request.measure_request()
        if measure_request is not None:
            profiles: tuple[Profile, ...] = (await self._measurer.measure(measure_request),)
        elif request.profiles is not None:
            profiles = request.profiles
        elif request.profile is not None:
            profiles = (request.profile,)
        else:
            profile, cluster, known = await self._estimated(project, request, fresh)
            profiles = (profile,)
        for profile in profiles:
            await self.create_profile(project, profile)
        return profiles, cluster, known

    async def _estimated(
        self, project: str, request: PlanRequest, fresh: bool
    ) -> tuple[Profile, Cluster, bool]:
        """The estimate of a model or graph, the cluster with its speeds, whether it was known."""
        graph = request.graph
        if request.graph_id is not None:
            with _pointing_at("/graph_id"):
                graph = (
                    await run_in_threadpool(self._store.documents.graph, project, request.graph_id)
                ).graph
                check_rebuilt(graph)
        elif graph is not None:
            await self.create_graph(project, graph)
        cluster = request.cluster
        asked = EstimateRequest(
            model=request.model,
            sample=request.sample,
            graph=graph,
            cluster=cluster,
            estimate=request.estimate or EstimateOptions(),
        )
        kinds = {(device.kind, device.memory_bytes) for device in cluster.devices}
        if len(kinds) > 1:  # speeds between kinds are part of the answer, and no profile's
            found = await self._estimator.estimate(asked)
            return found.profile, found.cluster, False
        digest = estimate_digest(asked)
        if not fresh:
            known = await run_in_threadpool(self._store.reuse.recall, project, "profile", digest)
            if known is not None:
                stored = await run_in_threadpool(self._store.documents.profile, project, known)
                return stored.profile, cluster, True
        found = await self._estimator.estimate(asked)
        kept = await self.create_profile(project, found.profile)
        await run_in_threadpool(self._store.reuse.remember, project, "profile", digest, kept.id)
        return found.profile, found.cluster, False


@contextmanager
def _pointing_at(field: str) -> Iterator[None]:
    """What a body names and is not stored is a field at fault, not a missing page."""
    try:
        yield
    except (NotFound, InvalidInput) as error:
        raise InvalidInput(str(error), field=field) from None


def decide(
    profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions, deadline_s: float
) -> PlanRecord:
    """Plan, with infeasibility as an answer.

    The answer names the profile it is of; where nothing fits, the first.

    Raises:
        InvalidInput: The planner refuses the request.
        DeadlineExceeded: No plan was found in time, and none was proven impossible.
    """
    try:
        answer = plan(profiles, cluster, options, deadline_s=deadline_s)
    except Infeasible as error:
        return PlanRecord(
            status="infeasible",
            profile_id=profiles[0].content_id(),
            cluster=cluster,
            options=options,
            infeasible=infeasible_answer(error),
        )
    return PlanRecord(
        status="planned",
        profile_id=answer.profile_id,
        cluster=cluster,
        options=options,
        plan=answer,
    )
