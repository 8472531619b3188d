"""What the service does, free of HTTP: measure if asked, plan, keep both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.cluster.cluster import Cluster
from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ...core.graph.graph import Graph
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ...core.requests.requests import EstimateOptions, EstimateRequest, MeasureRequest
from ...core.service.plans import PlanRecord, StoredPlan, to_infeasible_answer
from ...planner.plan import plan
from ..auth.principal import Principal
from ..http.field_errors import FieldError
from ..http.problems import Problem
from ..http.threads import in_busy_thread
from ..model_sources.custom_code import ForeignModels
from ..model_sources.estimator import Estimator
from ..model_sources.families import check_buildable
from ..model_sources.graph_limits import check_graph, check_rebuilt
from ..store.errors import RecordNotFound
from ..store.records import Stored
from ..store.store import Store
from .admission import check_effort
from .cache_keys import estimate_digest, is_final, plan_digest
from .requests import PlanRequest
from .solver_pool import Solver
from .what_if import (
    Comparison,
    ComparisonRequest,
    PricedSplit,
    Simulation,
    SimulationRequest,
    compare,
    price,
)

P = ParamSpec("P")
R = TypeVar("R")

MANY_LAYERS = 500
"""A digest of fewer takes some milliseconds."""

MeasuredBefore = Callable[[str, MeasureRequest, Cluster], Awaitable[str | None]]
"""Of a project and a cluster: the profile of an earlier measurement, by its id."""


Reused = Literal["plan", "profile"] | None


@dataclass(frozen=True)
class Answered:
    """A plan, and what of it had been found out before.

    Attributes:
        plan_id: Of the stored plan.
        text: The stored plan, as JSON.
        reused: ``plan`` if the very request had been answered, ``profile`` if the model's costs
            were known; `None` if everything is new.
    """

    plan_id: str
    text: str
    reused: Reused


@dataclass(frozen=True)
class Unmeasured:
    """What has to be measured before a request can be answered.

    Attributes:
        measure: The measurement.
        plan_digest: Of the whole request.
        deadline_s: Longest its plan may be searched for.
        fresh: Measure even what was measured before.
    """

    measure: MeasureRequest
    plan_digest: str
    deadline_s: float
    fresh: bool


class Planning:
    """Answers planning requests.

    Args:
        store: Where profiles and answers are kept.
        estimator: What estimates one.
        solver: Where plans are searched for.
        deadline_s: Longest one request may search for a plan.
        foreign: What models of others this server runs; none if not given.
        builds_here: Whether models are built on this machine, rather than by workers elsewhere.
    """

    def __init__(
        self,
        store: Store,
        estimator: Estimator,
        solver: Solver,
        *,
        deadline_s: float,
        foreign: ForeignModels | None = None,
        builds_here: bool = True,
    ) -> None:
        self._builds_here = builds_here
        self._foreign = foreign or ForeignModels()
        self._store = store
        self._estimator = estimator
        self._solver = solver
        self._deadline_s = deadline_s

    async def create_plan(
        self,
        principal: Principal,
        request: PlanRequest,
        measured_before: MeasuredBefore,
        *,
        fresh: bool = False,
    ) -> Answered | Unmeasured:
        """Plan, and keep the request with its answer; infeasible is an answer.

        Planning and storing run elsewhere: the event loop stays free.

        Args:
            principal: Whose project it is kept in.
            request: What is asked.
            measured_before: Tells the profile of an earlier measurement that will do.
            fresh: Find everything out again, whatever is known.

        Returns:
            The answer, or what has to be measured first.

        Raises:
            InvalidInput: The request makes no sense together, asks for more than this service
                does, or for more time than it gives.
            DeadlineExceeded: No plan was found in time, and none was proven impossible.
            Problem: 403: it asks for a measurement, which the caller may not. 422: no plan was
                found in the time that the request itself allows.
            StagewrightError: Estimating failed.
        """
        deadline_s = self._deadline(request)
        measure = await self._to_measure(principal.project_id, request)
        if measure is not None:
            self.check_measurement(principal, measure)
            fresh = fresh or measure.factory is not None  # what it makes may have changed
        digest = await self._beside(request, plan_digest, request, deadline_s)
        project = principal.project_id
        if not fresh:
            known = await run_in_threadpool(self._known_plan, project, digest)
            if known is not None:
                return known
        if measure is not None:
            profile_id = None if fresh else await measured_before(project, measure, request.cluster)
            if profile_id is None:
                return Unmeasured(measure, digest, deadline_s, fresh)
            found = await run_in_threadpool(self._store.documents.profile, project, profile_id)
            record = await self.from_profile(request, found.profile, deadline_s)
            return await run_in_threadpool(self._keep, project, digest, record, "profile")
        profiles, cluster, known_profile = await self._profiles(project, request, fresh)
        await self._beside(request, check_effort, profiles, cluster, request.options)
        record = await self._decide(request, profiles, cluster, deadline_s)
        reused: Reused = "profile" if known_profile else None
        return await run_in_threadpool(self._keep, project, digest, record, reused)

    async def _beside(
        self, request: PlanRequest, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """What a function returns that takes long where the request holds a large document."""
        given = (*([request.profile] if request.profile else []), *(request.profiles or ()))
        num_layers = sum(len(profile.layers) for profile in given)
        if request.graph is None and num_layers < MANY_LAYERS:
            return work(*args, **kwargs)
        return await in_busy_thread(work, *args, **kwargs)

    def check_measurement(self, principal: Principal, measure: MeasureRequest) -> None:
        """Refuse what may not be measured here, or not by this caller.

        Raises:
            InvalidInput, Problem: See `models.foreign.ForeignModels.check`; a family cannot be
                built here.
        """
        principal.require("measure", "measuring a model")
        self._foreign.check(principal, measure)
        if self._builds_here:
            check_buildable(measure.model)

    async def _to_measure(self, project: str, request: PlanRequest) -> MeasureRequest | None:
        """What has to be measured first, a graph that is named looked up."""
        if request.graph_id is None or not request.is_measured:
            return request.measure_request()
        with pointing_at("/graph_id"):
            found = await run_in_threadpool(self._store.documents.graph, project, request.graph_id)
            check_rebuilt(found.graph)
        return request.measure_request(found.graph)

    async def from_profile(
        self, request: PlanRequest, profile: Profile, deadline_s: float
    ) -> PlanRecord:
        """The answer to a request whose model was measured; stores nothing.

        Raises:
            InvalidInput, DeadlineExceeded: See `create_plan`.
        """
        check_effort([profile], request.cluster, request.options)
        return await self._decide(request, [profile], request.cluster, deadline_s)

    async def _decide(
        self,
        request: PlanRequest,
        profiles: Sequence[Profile],
        cluster: Cluster,
        deadline_s: float,
    ) -> PlanRecord:
        """As `decide`, in a process of its own.

        Raises:
            InvalidInput, DeadlineExceeded: See `decide`.
            Problem: 422: no plan was found in the time that the request itself allows.
        """
        try:
            return await self._solver.search(decide, profiles, cluster, request.options, deadline_s)
        except DeadlineExceeded as error:
            if request.deadline_s is None:
                raise
            told = FieldError(pointer="/deadline_s", detail=str(error))
            raise Problem(422, "deadline-exceeded", str(error), errors=[told]) from None

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

    async def simulate(self, principal: Principal, request: SimulationRequest) -> Simulation:
        """Price a split somebody chose; nothing is stored.

        Raises:
            InvalidInput: It is no split of that profile, or larger than this service does.
        """
        question = await self.question(principal, request)
        return await self.elsewhere(price, question, request.timeline)

    async def question(self, principal: Principal, request: SimulationRequest) -> PricedSplit:
        """What is to be priced, all that is stored looked up.

        Raises:
            InvalidInput: There is no split, or it is larger than this service does.
        """
        profile, base = await run_in_threadpool(self._base, principal.project_id, request)
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
        return PricedSplit(plan_of_base, profile, cluster, options, balance, tuple(replicas))

    async def elsewhere(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns that keeps a processor busy, where plans are searched for."""
        return await self._solver.run(work, *args, **kwargs)

    async def compare(self, principal: Principal, request: ComparisonRequest) -> Comparison:
        """Put stored plans side by side.

        Raises:
            InvalidInput: One of them is not stored.
        """
        return compare(await run_in_threadpool(self._named_plans, principal.project_id, request))

    def _named_plans(self, project: str, request: ComparisonRequest) -> tuple[StoredPlan, ...]:
        found = []
        for position, plan_id in enumerate(request.plan_ids):
            with pointing_at(f"/plan_ids/{position}"):
                found.append(self._store.documents.plan(project, plan_id))
        return tuple(found)

    def _base(self, project: str, request: SimulationRequest) -> tuple[Profile, StoredPlan | None]:
        documents = self._store.documents
        if request.profile is not None:
            return request.profile, None
        if request.profile_id is not None:
            with pointing_at("/profile_id"):
                return documents.profile(project, request.profile_id).profile, None
        assert request.plan_id is not None, "a SimulationRequest has one base"
        with pointing_at("/plan_id"):
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

    def _known_plan(self, project: str, digest: str) -> Answered | None:
        found = self._store.reuse.recall(project, "plan", digest)
        if found is None:
            return None
        return Answered(found, self._store.documents.plan_json(project, found), "plan")

    def _keep(self, project: str, digest: str, record: PlanRecord, reused: Reused) -> Answered:
        known_by = digest if is_final(record) else None
        stored = self._store.documents.put_plan(project, record, request_digest=known_by)
        return Answered(stored.id, stored.model_dump_json(), reused)

    async def _profiles(
        self, project: str, request: PlanRequest, fresh: bool
    ) -> tuple[tuple[Profile, ...], Cluster, bool]:
        """The profiles to plan from, stored; the cluster; whether the costs were known."""
        known = False
        cluster = request.cluster
        if request.profile_id is not None:
            with pointing_at("/profile_id"):
                found = await run_in_threadpool(
                    self._store.documents.profile, project, request.profile_id
                )
            return (found.profile,), cluster, False
        if request.profiles is not None:
            profiles: tuple[Profile, ...] = request.profiles
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
            with pointing_at("/graph_id"):
                graph = (
                    await run_in_threadpool(self._store.documents.graph, project, request.graph_id)
                ).graph
                check_rebuilt(graph)
        elif graph is not None:
            await self.create_graph(project, graph)
        elif self._builds_here:
            check_buildable(request.model)
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
def pointing_at(field: str) -> Iterator[None]:
    """What a body names and is not stored is a field at fault, not a missing page."""
    try:
        yield
    except (RecordNotFound, InvalidInput) as error:
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
            infeasible=to_infeasible_answer(error),
        )
    return PlanRecord(
        status="planned",
        profile_id=answer.profile_id,
        cluster=cluster,
        options=options,
        plan=answer,
    )
