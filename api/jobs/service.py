"""Submission, listing and cancellation of jobs, free of HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from starlette.concurrency import run_in_threadpool

from ...core.cluster.cluster import Cluster
from ...core.requests.requests import MeasureRequest, ProfilingOptions
from ...core.service.jobs import JobResult, JobView
from ..auth.access import Principal
from ..errors import MeasuringUnavailable
from ..planning.requests import PlanRequest, digest_measurement
from ..planning.service import MeasurementNeeded, Planning, pointing_at
from ..store.database import utc_now
from ..store.jobs import JobStore
from ..store.records import Job, JobRequest, JobState, Page
from ..store.store import Store
from .job_spec import JobSpec, required_resource
from .notifications import JobNotifications
from .outcome import read_problem
from .requests import ProfileJobRequest
from .runner import JobRunner

Kind = Literal["plan", "profile"]

POLL_S = 2.0
"""Interval at which a job is read while waiting for it: another server may run it."""


@dataclass(frozen=True)
class JobOptions:
    """Settings of a server that concern its jobs.

    Attributes:
        place: Where measurements are made (see `measuring_place`).
        needs_torch: Whether they are made on this machine, which then needs torch.
        deadline_s: Time from submission in which a job has to end.
    """

    place: str
    needs_torch: bool
    deadline_s: float


class JobService:
    """Jobs, as routes and pages use them."""

    def __init__(
        self,
        store: Store,
        planning: Planning,
        runner: JobRunner,
        notifications: JobNotifications,
        options: JobOptions,
    ) -> None:
        self.notifications = notifications
        self._store, self._planning, self._runner = store, planning, runner
        self._options = options
        self._submitting = asyncio.Lock()

    async def submit_plan(
        self,
        principal: Principal,
        request: PlanRequest,
        unmeasured: MeasurementNeeded,
        *,
        submit_key: str | None,
    ) -> Job:
        """Queue a measurement and the plan to make from it, or join an equal unfinished job.

        Raises:
            MeasuringUnavailable: This server cannot measure.
            TooManyJobs: The caller's limit on unfinished jobs is reached.
        """
        spec = JobSpec(
            measure=unmeasured.measure,
            measure_digest=self._digest(unmeasured.measure, None, request.cluster),
            fresh=unmeasured.fresh,
            plan=request,
            plan_digest=unmeasured.plan_digest,
            plan_deadline_s=unmeasured.deadline_s,
        )
        needs = required_resource(unmeasured.measure, None, request.cluster)
        return await self._submit(principal, "plan", spec, needs, submit_key)

    async def submit_profile(
        self,
        principal: Principal,
        request: ProfileJobRequest,
        *,
        fresh: bool = False,
        submit_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Queue a measurement; return the job and whether an earlier measurement finished it.

        Raises:
            InvalidInput: The parts of the request do not fit together.
            MeasuringUnavailable, TooManyJobs: See `submit_plan`.
        """
        measure = await self._measure_request(principal.project_id, request)
        self._planning.check_measurement(principal, measure)
        fresh = fresh or measure.factory is not None  # its code may have changed
        needs = required_resource(measure, request.device_kind, None)
        digest = self._digest(measure, request.device_kind, None)
        spec = JobSpec(measure=measure, measure_digest=digest, fresh=fresh)
        if not fresh:
            known = await run_in_threadpool(
                self._store.reuse.recall, principal.project_id, "profile", digest
            )
            if known is not None:
                return await self._done(principal, spec, needs, submit_key, known), True
        return await self._submit(principal, "profile", spec, needs, submit_key), False

    async def find_measurement(
        self, project_id: str, measure: MeasureRequest, cluster: Cluster
    ) -> str | None:
        """Return the id of an earlier equal measurement's profile, if there is one."""
        digest = self._digest(measure, None, cluster)
        return await run_in_threadpool(self._store.reuse.recall, project_id, "profile", digest)

    async def get(self, project_id: str, job_id: str) -> Job:
        """Return a job. Raises: RecordNotFound."""
        return await run_in_threadpool(self._store.jobs.get, project_id, job_id)

    async def list(
        self, project_id: str, *, limit: int, cursor: str | None, state: JobState | None
    ) -> Page[Job]:
        """Return a page of jobs, newest first."""
        return await run_in_threadpool(
            self._store.jobs.list, project_id, limit=limit, cursor=cursor, state=state
        )

    async def cancel(self, project_id: str, job_id: str) -> Job:
        """Cancel a job, or ask its worker to stop; an ended job stays as it is.

        Raises:
            NotFound: There is none.
        """
        job = await run_in_threadpool(self._store.jobs.request_cancel, project_id, job_id)
        self._runner.cancellation_requested(job_id)
        return job

    async def wait(self, job: Job, wait_s: float, *, even_unserved: bool = True) -> Job:
        """Return the job once it has ended, after a timeout, or when the server stops.

        Args:
            job: The job.
            wait_s: The timeout.
            even_unserved: Whether to wait although no worker offers what the job needs.
        """
        end = time.monotonic() + wait_s
        with self.notifications.watch(job.id) as watch:
            while True:
                job = await self.get(job.project_id, job.id)
                remaining = end - time.monotonic()
                if job.is_finished or remaining <= 0 or self.notifications.is_stopped:
                    return job
                if not even_unserved and await self._runner.is_unserved(job):
                    return job
                # Changes made by this server end the wait; those of others show in the row alone.
                await watch.wait(min(remaining, POLL_S))

    async def views(self, jobs: Sequence[Job]) -> tuple[JobView, ...]:
        """Return jobs as clients see them."""
        latest = await run_in_threadpool(
            self._store.jobs.latest, [job.id for job in jobs], "progress"
        )
        return tuple(self._view(job, latest.get(job.id)) for job in jobs)

    async def view(self, job: Job) -> JobView:
        """Return a job as clients see it."""
        (view,) = await self.views([job])
        return view

    def _view(self, job: Job, progress_json: str | None) -> JobView:
        progress: dict[str, Any] | None = json.loads(progress_json) if progress_json else None
        return JobView(
            id=job.id,
            kind="plan" if job.kind == "plan" else "profile",
            state=job.state,
            attempt=job.attempt,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            deadline_at=job.deadline_at,
            needs={} if job.needs is None else {job.needs: 1},
            message=self._runner.message(job),
            progress=progress,
            result=_result(job.result_id) if job.state == "succeeded" else None,
            problem=read_problem(job.outcome_json) if job.state == "failed" else None,
        )

    def _digest(self, measure: MeasureRequest, kind: str | None, cluster: Cluster | None) -> str:
        return digest_measurement(
            measure, required_resource(measure, kind, cluster), self._options.place
        )

    async def _measure_request(self, project: str, request: ProfileJobRequest) -> MeasureRequest:
        graph = request.graph
        if request.graph_id is not None:
            with pointing_at("/graph_id"):
                graph = (
                    await run_in_threadpool(self._store.documents.graph, project, request.graph_id)
                ).graph
        return MeasureRequest(
            model=request.model,
            sample=request.sample,
            graph=graph,
            factory=request.factory,
            profiling=request.profiling or ProfilingOptions(),
        )

    async def _submit(
        self,
        principal: Principal,
        kind: Literal["plan", "profile"],
        spec: JobSpec,
        needs: str,
        key: str | None,
    ) -> Job:
        if self._options.needs_torch and importlib.util.find_spec("torch") is None:
            raise MeasuringUnavailable(
                "measuring needs torch on the server; post a profile instead, "
                "or install stagewright[torch]"
            )
        request = await run_in_threadpool(self._request, kind, spec, needs, key)
        # One at a time, so that of two equal requests the second joins the first.
        async with self._submitting:
            job = None
            if not spec.fresh and request.request_digest is not None:
                job = await run_in_threadpool(
                    self._store.jobs.unfinished_like, principal.project_id, request.request_digest
                )
            if job is None:
                job = await run_in_threadpool(submit, self._store.jobs, principal, request)
        self._runner.take(job)
        return job

    async def _done(
        self, principal: Principal, spec: JobSpec, needs: str, key: str | None, result_id: str
    ) -> Job:
        """Submit a job and end it at once with a stored result."""
        request = self._request("profile", spec, needs, key)
        job = await run_in_threadpool(submit, self._store.jobs, principal, request)
        started = await run_in_threadpool(
            self._store.jobs.start, job.id, attempt=job.attempt, worker="reuse"
        )
        if started is not None:
            await run_in_threadpool(
                self._store.jobs.finish, job.id, started.attempt, "succeeded", result_id=result_id
            )
        return await self.get(principal.project_id, job.id)

    def _request(self, kind: Kind, spec: JobSpec, needs: str, key: str | None) -> JobRequest:
        return JobRequest(
            kind=kind,
            # Unset fields stay unset: planners ask which options were given.
            request_json=spec.model_dump_json(exclude_unset=True),
            request_digest=spec.plan_digest or spec.measure_digest,
            submit_key=key,
            needs=needs,
            deadline_at=utc_now() + timedelta(seconds=self._options.deadline_s),
        )


def _result(result_id: str | None) -> JobResult | None:
    if result_id is None:
        return None
    kind: Literal["plan", "profile", "graph"]
    if result_id.startswith("plan_"):
        kind = "plan"
    else:
        kind = "profile" if result_id.startswith("profile_") else "graph"
    return JobResult(kind=kind, id=result_id, href=f"/v1/{kind}s/{result_id}")


def submit(jobs: JobStore, principal: Principal, request: JobRequest) -> Job:
    """Queue a job of the caller's project.

    It counts towards the key's limit until it ends; jobs of the server's own token count together.

    Raises:
        TooManyJobs: The key's limit on unfinished jobs is reached.
    """
    owned = request.model_copy(update={"key_id": principal.id})
    limit = principal.quotas.max_unfinished_jobs
    return jobs.submit(principal.project_id, owned, max_unfinished=limit)
