"""The planning service: estimate or measure if asked, plan, and store both."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.cluster.cluster import Cluster
from ...core.errors import DeadlineExceeded, InvalidInput
from ...core.graph.graph import Graph
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ...core.requests.requests import (
    Estimated,
    EstimateOptions,
    EstimateRequest,
    MeasureRequest,
)
from ...core.service.documents import PlanRecord, StoredPlan
from ..auth.access import Principal
from ..errors import RequestDeadlineExceeded
from ..http.threads import in_busy_thread
from ..model_sources.estimator import Estimator
from ..model_sources.factories import Factories, check_call
from ..model_sources.families import check_buildable
from ..model_sources.graph_limits import check_graph, check_rebuilt
from ..store.errors import RecordNotFound
from ..store.records import Stored
from ..store.store import Store
from .decision import decide, is_final
from .progress import PlanningPhases, SearchProgress
from .requests import PlanRequest, check_effort, digest_estimate, digest_plan_request
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
"""The digest of a request with fewer takes a few milliseconds, less than to change threads."""

FindMeasurement = Callable[[str, MeasureRequest, Cluster], Awaitable[str | None]]
"""Returns the profile id of an earlier measurement in a project, for a cluster, or `None`."""

Reused = Literal["plan", "profile"] | None


@dataclass(frozen=True)
class PlanResult:
    """A stored plan, with its JSON.

    Attributes:
        reused: ``plan`` if this request was answered before, ``profile`` if the model's costs were
            known; `None` if everything is new.
    """

    plan_id: str
    text: str
    reused: Reused


@dataclass(frozen=True)
class MeasurementNeeded:
    """A request that cannot be answered before its model is measured.

    Attributes:
        plan_digest: Digest of the whole request.
        deadline_s: Time to search for the plan.
        fresh: Whether to ignore earlier measurements.
    """

    measure: MeasureRequest
    plan_digest: str
    deadline_s: float
    fresh: bool


class Planning:
    """Service that answers planning requests.

    Args:
        store: Keeps profiles and plans.
        estimator: Estimates profiles.
        solver: Runs searches.
        deadline_s: Longest search of one request.
        factories: Registered model factories.
        builds_here: Whether models are built on this machine, rather than by workers elsewhere.

    Attributes:
        phases: What requests are doing.
    """

    def __init__(
        self,
        store: Store,
        estimator: Estimator,
        solver: Solver,
        *,
        deadline_s: float,
        factories: Factories | None = None,
        builds_here: bool = True,
    ) -> None:
        self.phases = PlanningPhases()
        self._builds_here = builds_here
        self._factories = factories or {}
        self._store = store
        self._estimator = estimator
        self._solver = solver
        self._deadline_s = deadline_s

    async def create_plan(
        self,
        principal: Principal,
        request: PlanRequest,
        find_measurement: FindMeasurement,
        *,
        fresh: bool = False,
    ) -> PlanResult | MeasurementNeeded:
        """Plan, and store the request with its result; infeasible is a result, too.

        Where the model has to be measured first, return that measurement. A ``fresh`` answer uses
        no earlier results.

        Raises:
            InvalidInput: Fields of the request contradict each other, or it exceeds a limit of
                this server.
            DeadlineExceeded: No plan was found in time, and none was proven impossible.
            Forbidden: It asks for a measurement, which the principal may not.
            StagewrightError: Estimating failed.
        """
        began_s, deadline_s = time.monotonic(), self._choose_deadline(request)
        project = principal.project_id
        graph = None
        if request.graph_id is not None and request.is_measured:
            graph = await self._read_graph(project, request.graph_id)
        measure = request.measure_request(graph)
        if measure is not None:
            # Before the cache is consulted: it would answer those who may not measure, too.
            self.check_measurement(principal, measure)
            fresh = fresh or measure.factory is not None  # what a factory makes may have changed
        digest = await self._run_beside(request, digest_plan_request, request, deadline_s)
        if not fresh:
            known = await run_in_threadpool(self._recall_plan, project, digest)
            if known is not None:
                return known
        if measure is not None:
            profile_id = (
                None if fresh else await find_measurement(project, measure, request.cluster)
            )
            if profile_id is None:
                return MeasurementNeeded(measure, digest, deadline_s, fresh)
            found = await run_in_threadpool(self._store.documents.profile, project, profile_id)
            check_effort([found.profile], request.cluster, request.options)
            record = await self._search(
                project, request, [found.profile], request.cluster, deadline_s
            )
            return await run_in_threadpool(self._put_plan, project, digest, record, "profile")
        profiles, cluster, is_known = await self._get_profiles(project, request, fresh)
        await self._run_beside(request, check_effort, profiles, cluster, request.options)
        if request.deadline_s is not None:  # an estimate counts, too
            deadline_s -= time.monotonic() - began_s
        record = await self._search(project, request, profiles, cluster, deadline_s)
        reused: Reused = "profile" if is_known else None
        return await run_in_threadpool(self._put_plan, project, digest, record, reused)

    async def _run_beside(
        self, request: PlanRequest, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a function in a thread if the request holds a document large enough to matter."""
        given = (*([request.profile] if request.profile else []), *(request.profiles or ()))
        num_layers = sum(len(profile.layers) for profile in given)
        if request.graph is None and num_layers < MANY_LAYERS:
            return work(*args, **kwargs)
        return await in_busy_thread(work, *args, **kwargs)

    def check_measurement(self, principal: Principal, measure: MeasureRequest) -> None:
        """Refuse a measurement that this server does not make, or not for this principal."""
        principal.require("measure", "measuring a model")
        if measure.factory is not None:
            check_call(measure.factory, self._factories)
        if self._builds_here:
            check_buildable(measure.model)

    async def _read_graph(self, project: str, graph_id: str) -> Graph:
        with pointing_at("/graph_id"):
            found = await run_in_threadpool(self._store.documents.graph, project, graph_id)
            check_rebuilt(found.graph)
        return found.graph

    async def from_profile(
        self, project: str, request: PlanRequest, profile: Profile, deadline_s: float
    ) -> PlanRecord:
        """Plan a job whose model has been measured, however busy the server; store nothing."""
        check_effort([profile], request.cluster, request.options)
        return await self._search(
            project, request, [profile], request.cluster, deadline_s, is_patient=True
        )

    async def _search(
        self,
        project: str,
        request: PlanRequest,
        profiles: Sequence[Profile],
        cluster: Cluster,
        deadline_s: float,
        *,
        is_patient: bool = False,
    ) -> PlanRecord:
        """Run `decide` in a solver process."""
        progress = SearchProgress(request.options.objective)
        with blaming_own_deadline(request), self.phases.phase(project, progress):
            return await self._solver.search(
                partial(decide, profiles, cluster, request.options),
                deadline_s,
                project=project,
                is_patient=is_patient,
                progress=progress,
                read_kept=PlanRecord.model_validate_json,
            )

    async def create(self, project_id: str, document: Profile | Graph) -> Stored:
        """Store a document. Raises: InvalidInput, if a graph is too large for this service."""
        if isinstance(document, Graph):
            check_graph(document)
        return await run_in_threadpool(self._store.documents.put, project_id, document)

    async def simulate(self, principal: Principal, request: SimulationRequest) -> Simulation:
        """Price a given split; store nothing."""
        split = await self.resolve_split(principal, request)
        return await self.run_in_solver(principal, price, split, request.timeline)

    async def run_in_solver(
        self, principal: Principal, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run short CPU-bound work in a solver process, when it is the project's turn."""
        return await self._solver.run(partial(work, *args, **kwargs), project=principal.project_id)

    async def resolve_split(self, principal: Principal, request: SimulationRequest) -> PricedSplit:
        """Return the split to be priced, with everything stored looked up. Raises: InvalidInput."""
        profile, base = await run_in_threadpool(self._read_base, principal.project_id, request)
        base_plan = None if base is None else base.plan
        cluster = request.cluster or (base.cluster if base else None)
        options = request.options or (base.options if base else PlanOptions())
        balance, replicas = request.balance, request.replicas or ()
        if balance is None and base_plan is not None:
            balance = base_plan.balance
            replicas = tuple(stage.replicas for stage in base_plan.stages)
        if balance is None or cluster is None:
            raise InvalidInput(
                "that plan is infeasible, so it has no split to start from; give a 'balance'",
                field="/balance",
            )
        check_effort([profile], cluster, options)
        return PricedSplit(base_plan, profile, cluster, options, balance, tuple(replicas))

    def _read_base(
        self, project: str, request: SimulationRequest
    ) -> tuple[Profile, StoredPlan | None]:
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

    async def compare(self, principal: Principal, request: ComparisonRequest) -> Comparison:
        """Compare stored plans. Raises: InvalidInput, if one of them is not stored."""
        return compare(await run_in_threadpool(self._read_plans, principal.project_id, request))

    def _read_plans(self, project: str, request: ComparisonRequest) -> tuple[StoredPlan, ...]:
        found = []
        for position, plan_id in enumerate(request.plan_ids):
            with pointing_at(f"/plan_ids/{position}"):
                found.append(self._store.documents.plan(project, plan_id))
        return tuple(found)

    def _choose_deadline(self, request: PlanRequest) -> float:
        if request.deadline_s is None:
            return self._deadline_s
        if request.deadline_s > self._deadline_s:
            raise InvalidInput(
                f"this server searches for at most {self._deadline_s:g} s, not "
                f"{request.deadline_s:g} s; ask for less, or plan with the library",
                field="/deadline_s",
            )
        return request.deadline_s

    def _recall_plan(self, project: str, digest: str) -> PlanResult | None:
        found = self._store.reuse.recall(project, "plan", digest)
        if found is None:
            return None
        try:
            return PlanResult(found, self._store.documents.json("plan", project, found), "plan")
        except RecordNotFound:  # deleted since
            return None

    def _put_plan(
        self, project: str, digest: str, record: PlanRecord, reused: Reused
    ) -> PlanResult:
        known_by = digest if is_final(record) else None
        try:
            stored = self._store.documents.put_plan(project, record, request_digest=known_by)
        except RecordNotFound as error:
            raise InvalidInput(f"{error}: it was deleted during the search; ask again") from None
        return PlanResult(stored.id, stored.model_dump_json(), reused)

    async def _get_profiles(
        self, project: str, request: PlanRequest, fresh: bool
    ) -> tuple[tuple[Profile, ...], Cluster, bool]:
        """Return the profiles, stored, the cluster, and whether the costs were known."""
        cluster, is_known = request.cluster, False
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
            profile, cluster, is_known = await self._estimate(project, request, fresh)
            profiles = (profile,)
        # Stored before the search: a client that gives up can name them by id the next time.
        for profile in profiles:
            await self.create(project, profile)
        return profiles, cluster, is_known

    async def _estimate(
        self, project: str, request: PlanRequest, fresh: bool
    ) -> tuple[Profile, Cluster, bool]:
        """Return the estimate, the cluster with its speeds, and whether the estimate was known."""
        graph = request.graph
        if request.graph_id is not None:
            graph = await self._read_graph(project, request.graph_id)
        elif graph is not None:
            await self.create(project, graph)
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
        if len(kinds) > 1:
            # The estimate then includes speeds between the kinds, which no profile can hold.
            found = await self._run_estimate(asked, project, request)
            return found.profile, found.cluster, False
        digest = digest_estimate(asked)
        if not fresh:
            known = await run_in_threadpool(self._store.reuse.recall, project, "profile", digest)
            if known is not None:
                stored = await run_in_threadpool(self._store.documents.profile, project, known)
                return stored.profile, cluster, True
        found = await self._run_estimate(asked, project, request)
        kept = await self.create(project, found.profile)
        await run_in_threadpool(self._store.reuse.remember, project, "profile", digest, kept.id)
        return found.profile, found.cluster, False

    async def _run_estimate(
        self, asked: EstimateRequest, project: str, request: PlanRequest
    ) -> Estimated:
        phase = self.phases.phase(project, "Estimating what each layer costs …")
        with blaming_own_deadline(request), phase:
            return await self._estimator.estimate(asked, project, request.deadline_s)


@contextmanager
def blaming_own_deadline(request: PlanRequest) -> Iterator[None]:
    """Blame the request for a deadline that it set itself: a 422, not a 504."""
    try:
        yield
    except DeadlineExceeded as error:
        if request.deadline_s is None:
            raise
        raise RequestDeadlineExceeded(str(error)) from None


@contextmanager
def pointing_at(field: str) -> Iterator[None]:
    """Blame a field of the body for what it names and what is not stored: a 422, not a 404."""
    try:
        yield
    except (RecordNotFound, InvalidInput) as error:
        raise InvalidInput(str(error), field=field) from None
