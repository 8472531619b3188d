"""Submission, listing and cancellation of jobs, free of HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from starlette.concurrency import run_in_threadpool

from ...core.cluster.cluster import Cluster
from ...core.requests.requests import MeasureRequest, ProfilingOptions
from ...core.service.jobs import JobResult, JobView
from ..auth.access import Principal
from ..errors import MeasuringUnavailable
from ..fair_limits import FairShares
from ..planning.requests import PlanRequest, digest_measurement
from ..planning.service import MeasurementNeeded, Planning, pointing_at
from ..store.database import utc_now
from ..store.jobs import JobStore
from ..store.records import Job, JobRequest, JobState, Page
from ..store.store import Store
from .notifications import JobNotifications
from .outcome import read_problem
from .requests import JobSpec, ProfileJobRequest, required_resource
from .runner import JobRunner

POLL_S = 2.0
"""Interval at which a job is read while waiting for it: another server may run it."""

MAX_KEY_STREAMS = 20
"""Streams of events of one key at once."""

MAX_STREAMS = 200
"""Streams of events at once; each reads the store every `POLL_S`."""

SHOWN = JobView.model_fields.keys() & Job.model_fields.keys() - {"needs"}
"""Fields of a job that clients see as they are."""


@dataclass(frozen=True)
class JobOptions:
    """Settings of a server that concern its jobs.

    Attributes:
        place: Where measurements are made (see `measuring_place`).
        needs_torch: Whether they are made on this machine, which then needs torch.
        deadline_s: Time from submission in which a job has to end.
        key_jobs: Unfinished jobs of a key without a quota of its own.
        project_jobs: Unfinished jobs of all keys of a project.
    """

    place: str
    needs_torch: bool
    deadline_s: float
    key_jobs: int | None = None
    project_jobs: int | None = None


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
        self.streams = FairShares(MAX_KEY_STREAMS, MAX_STREAMS)

    async def submit_plan(
        self,
        principal: Principal,
        request: PlanRequest,
        unmeasured: MeasurementNeeded,
        *,
        submit_key: str | None,
    ) -> Job:
        """Queue a measurement and the plan to make from it, or join an equal unfinished job.

        Raises: MeasuringUnavailable, TooManyJobs.
        """
        needs, digest = self._digest(unmeasured.measure, None, request.cluster)
        spec = JobSpec(
            measure=unmeasured.measure,
            measure_digest=digest,
            fresh=unmeasured.fresh,
            plan=request,
            plan_digest=unmeasured.plan_digest,
            plan_deadline_s=unmeasured.deadline_s,
        )
        return await self._submit(principal, spec, needs, submit_key)

    async def submit_profile(
        self,
        principal: Principal,
        request: ProfileJobRequest,
        *,
        fresh: bool = False,
        submit_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Queue a measurement; return the job and whether an earlier measurement finished it.

        Raises: InvalidInput, MeasuringUnavailable, TooManyJobs.
        """
        measure = await self._measure_request(principal.project_id, request)
        self._planning.check_measurement(principal, measure)
        needs, digest = self._digest(measure, request.device_kind, None)
        fresh = fresh or measure.factory is not None  # its code may have changed
        spec = JobSpec(measure=measure, measure_digest=digest, fresh=fresh)
        known = None if fresh else await self._recall(principal.project_id, digest)
        if known is None:
            return await self._submit(principal, spec, needs, submit_key), False
        # A job of its own, which ends at once with the stored result.
        job = await run_in_threadpool(
            submit, self._store.jobs, principal, self._request(spec, needs, submit_key)
        )
        started = await run_in_threadpool(
            self._store.jobs.start, job.id, attempt=job.attempt, worker="reuse"
        )
        if started is not None:
            await run_in_threadpool(
                self._store.jobs.finish, job.id, started.attempt, "succeeded", result_id=known
            )
        return await self.get(principal.project_id, job.id), True

    async def find_measurement(
        self, project_id: str, measure: MeasureRequest, cluster: Cluster
    ) -> str | None:
        """Return the id of an earlier equal measurement's profile, if there is one."""
        _, digest = self._digest(measure, None, cluster)
        return await self._recall(project_id, digest)

    async def _recall(self, project_id: str, digest: str) -> str | None:
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

        Raises: NotFound.
        """
        job = await run_in_threadpool(self._store.jobs.request_cancel, project_id, job_id)
        self._runner.cancellation_requested(job_id)
        return job

    async def wait(self, job: Job, wait_s: float, *, even_unserved: bool = True) -> Job:
        """Return the job once it has ended, after a timeout, or when the server stops.

        Unless ``even_unserved``, return at once if no worker offers what the job needs.
        """
        end = time.monotonic() + wait_s
        with self.notifications.watch(job.id) as wait_for_change:
            while True:
                job = await self.get(job.project_id, job.id)
                remaining = end - time.monotonic()
                if job.is_finished or remaining <= 0 or self.notifications.is_stopped:
                    return job
                if not even_unserved and await self._runner.is_unserved(job):
                    return job
                # Changes made by this server end the wait; those of others show in the row alone.
                await wait_for_change(min(remaining, POLL_S))

    async def views(self, jobs: Sequence[Job]) -> tuple[JobView, ...]:
        """Return jobs as clients see them."""
        latest = await run_in_threadpool(
            self._store.jobs.latest, [job.id for job in jobs], "progress"
        )
        return tuple(self._view(job, latest.get(job.id, "null")) for job in jobs)

    async def view(self, job: Job) -> JobView:
        """Return a job as clients see it."""
        (view,) = await self.views([job])
        return view

    def _view(self, job: Job, progress_json: str) -> JobView:
        return JobView.model_validate(
            {
                **job.model_dump(include=SHOWN),
                "needs": {} if job.needs is None else {job.needs: 1},
                "message": self._runner.message(job),
                "progress": json.loads(progress_json),
                "result": _result(job.result_id) if job.state == "succeeded" else None,
                "problem": read_problem(job.outcome_json) if job.state == "failed" else None,
            }
        )

    def _digest(
        self, measure: MeasureRequest, kind: str | None, cluster: Cluster | None
    ) -> tuple[str, str]:
        """Return what a measurement needs, and its digest."""
        needs = required_resource(measure, kind, cluster)
        return needs, digest_measurement(measure, needs, self._options.place)

    async def _measure_request(self, project: str, request: ProfileJobRequest) -> MeasureRequest:
        graph = request.graph
        if request.graph_id is not None:
            read = self._store.documents.graph
            with pointing_at("/graph_id"):
                graph = (await run_in_threadpool(read, project, request.graph_id)).graph
        return MeasureRequest(
            model=request.model,
            sample=request.sample,
            graph=graph,
            factory=request.factory,
            profiling=request.profiling or ProfilingOptions(),
        )

    async def _submit(
        self, principal: Principal, spec: JobSpec, needs: str, key: str | None
    ) -> Job:
        if self._options.needs_torch and importlib.util.find_spec("torch") is None:
            raise MeasuringUnavailable(
                "measuring needs torch on the server; post a profile instead, "
                "or install stagewright[torch]"
            )
        request = await run_in_threadpool(self._request, spec, needs, key)
        # One at a time, so that of two equal requests the second joins the first.
        async with self._submitting:
            job = None
            if not spec.fresh and request.request_digest is not None:
                job = await run_in_threadpool(
                    self._store.jobs.unfinished_like, principal.project_id, request.request_digest
                )
            if job is None:
                job = await run_in_threadpool(
                    submit, self._store.jobs, principal, request, self._options
                )
        self._runner.take(job)
        return job

    def _request(self, spec: JobSpec, needs: str, key: str | None) -> JobRequest:
        return JobRequest(
            kind="profile" if spec.plan is None else "plan",
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
    kind = result_id.partition("_")[0]
    href = f"/v1/{kind}s/{result_id}"
    return JobResult.model_validate({"kind": kind, "id": result_id, "href": href})


def submit(
    jobs: JobStore, principal: Principal, request: JobRequest, options: JobOptions | None = None
) -> Job:
    """Queue a job of the caller's project. Raises: TooManyJobs.

    It counts towards the limits of its key and project until it ends. The server's own token has
    no limits.
    """
    limit, of_project = principal.quotas.max_unfinished_jobs, None
    if options is not None and principal.id is not None:
        limit = options.key_jobs if limit is None else limit
        of_project = options.project_jobs
    owned = request.model_copy(update={"key_id": principal.id})
    return jobs.submit(principal.project_id, owned, max_unfinished=limit, max_of_project=of_project)
