"""One attempt at a job: a task given to a worker, whose messages are written to the job's row."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, to_printable
from ...core.profile.profile import Profile
from ...core.service.documents import PlanRecord
from ..errors import WorkerGaveOut
from ..model_sources.measure import MeasuringSetup
from ..planning.decision import is_final
from ..planning.service import Planning
from ..store.database import utc_now
from ..store.errors import StoreUnavailable
from ..store.records import FinalState, Job
from ..store.store import Store
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import span
from .async_workers import AsyncWorkers
from .messages import (
    Heartbeat,
    ProfileMeasured,
    TaskFailed,
    WorkerLost,
    WorkerMessage,
    WorkerProgress,
    WorkerStarted,
    WorkerTask,
)
from .notifications import JobNotifications
from .outcome import error_from_failure, event_data, problem_json
from .requests import JobSpec

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RETRY_S = 1.0
"""Pause before a database that does not answer is asked again."""

LOOK_S = 1.0
"""Interval at which a silent worker and the deadline are checked."""

GIVE_BACK_S = 5.0
"""Longest wait for the database when the server stops."""

QUEUED_LOOK_S = 5.0
"""Interval at which the row of a queued job is read: another server may end the job."""


@dataclass(frozen=True)
class JobContext:
    """Everything that the attempts of one server share.

    Attributes:
        planning: Makes plans from measured profiles.
        setup: How workers measure; see `WorkerTask`.
        max_attempts: A job whose worker was lost this many times fails.
        silence_s: A worker without a message for this long counts as lost.
        now: The store's clock.
    """

    store: Store
    workers: AsyncWorkers
    planning: Planning
    notifications: JobNotifications
    setup: MeasuringSetup | None = None
    max_attempts: int = 5
    silence_s: float = 15.0
    now: Callable[[], datetime] = utc_now
    metrics: Metrics = field(default_factory=Metrics)


class JobAttempt:
    """One attempt at a job; lives on the server's event loop.

    The row in the store is the truth. Every write names the attempt's number, and once the store
    says that another attempt is the present one, this one stops without a trace.
    """

    def __init__(self, job: Job, spec: JobSpec, context: JobContext) -> None:
        self.job = job
        self.is_running = False
        # Random, because two servers may attempt the same job at the same scheduler.
        self._key = f"{job.id}-{job.attempt + 1}-{secrets.token_hex(4)}"
        self._spec, self._context, self._store = spec, context, context.store
        self._inbox: asyncio.Queue[WorkerMessage | None] = asyncio.Queue()
        self._last_message_s = time.monotonic()
        self._starting: asyncio.Future[Job | None] | None = None

    def check_now(self) -> None:
        """Read the row again at once, because its cancellation was requested."""
        self._inbox.put_nowait(None)

    async def run(self) -> None:
        """Run until the job has ended, is queued again, or belongs to another attempt.

        Raises: WorkersUnavailable.
        """
        loop = asyncio.get_running_loop()

        def on_message(message: WorkerMessage) -> None:
            # Backends call from threads of their own, and asyncio's queues are not thread-safe.
            loop.call_soon_threadsafe(self._inbox.put_nowait, message)

        request_json = await run_in_threadpool(self._spec.measure.model_dump_json)
        task = WorkerTask(self._key, request_json, self.job.needs or "", self._context.setup)
        try:
            await self._context.workers.submit(task, on_message)
            if await self._wait_for_start():
                with span("stagewright.measure", attempt=self.job.attempt):
                    await self._follow_to_end()
        finally:
            await self._context.workers.stop(self._key)

    async def finish_with(self, profile: Profile) -> bool:
        """End the job with another job's profile; return whether it was still to be started."""
        if not await self._start("reuse"):
            return False
        await self._conclude(profile)
        self.is_running = False
        return True

    async def give_back(self) -> None:
        """Queue the job again, because this server stops."""
        job = self.job if self.is_running else None
        if self._starting is not None:  # interrupted while the start was being written
            await asyncio.wait([self._starting], timeout=GIVE_BACK_S)
            job = self._starting.result() if self._starting.done() else None
        if job is not None:
            await run_in_threadpool(self._store.jobs.requeue, job.id, job.attempt)

    async def _wait_for_start(self) -> bool:
        """Wait until a worker begins; return whether this attempt then owns the job."""
        while True:
            message = await self._next_message(QUEUED_LOOK_S)
            if isinstance(message, WorkerLost):
                await asyncio.sleep(RETRY_S)
                return False
            if message is not None:
                break
            job = await read_job(self._store, self.job)
            if (job.state, job.attempt) != ("queued", self.job.attempt) or is_late(
                job, self._context.now()
            ):
                return False
        if isinstance(message, WorkerStarted):
            return await self._start(message.worker)
        # Dask's events may arrive after the result, or not at all.
        self._inbox.put_nowait(message)
        return await self._start("unknown")

    async def _start(self, worker: str) -> bool:
        """Make this the present attempt; return False if another one was faster."""
        job = self.job
        self._starting = asyncio.ensure_future(
            retry_until_available(
                self._store.jobs.start, job.id, attempt=job.attempt, worker=worker
            )
        )
        # Shielded: when the server stops, `give_back` has to know whether the start was written.
        started = await asyncio.shield(self._starting)
        self._starting = None
        if started is None:
            return False
        self.job, self.is_running = started, True
        _log.info("job started", extra={"attempt": started.attempt, "worker": worker})
        # Later attempts would count the time of lost ones as waiting.
        if started.attempt == 1 and started.started_at is not None:
            waited = started.started_at - started.created_at
            self._context.metrics.job_started(started.kind, waited.total_seconds())
        self._context.notifications.changed(job.id)
        return True

    async def _follow_to_end(self) -> None:
        """Follow the worker; an internal error fails the job, since it would occur again."""
        try:
            await self._follow()
        except Exception as error:  # noqa: BLE001 - whatever it is, the job has to end
            await self._finish("failed", problem=problem_json(error))
        self.is_running = False

    async def _follow(self) -> None:
        """Write the worker's messages to the row until the job or this attempt ends."""
        is_ours = True
        while is_ours and not self.job.is_finished:
            message = await self._next_message(LOOK_S)
            match message:
                case ProfileMeasured(profile_json):
                    parse = Profile.model_validate_json
                    await self._conclude(await run_in_threadpool(parse, profile_json))
                    return
                case TaskFailed():
                    await self._finish("failed", problem=problem_json(error_from_failure(message)))
                    return
                case WorkerLost(why):
                    await self._requeue_or_fail(why)
                    return
                case WorkerProgress(done, total, layer):
                    layer = to_printable(layer)
                    is_ours = await self._report(
                        event_data(step="measuring", done=done, total=total, layer=layer)
                    )
                case Heartbeat():
                    is_ours = await self._beat()
                case _:
                    is_ours = await self._check_silence()

    async def _check_silence(self) -> bool:
        """Return whether to go on waiting for a worker that sent nothing for `LOOK_S`."""
        silence_s = self._context.silence_s
        if time.monotonic() - self._last_message_s > silence_s:
            await self._requeue_or_fail(f"its worker sent nothing for {silence_s:g} s")
            return False
        if is_late(self.job, self._context.now()):
            await self._finish("failed", problem=deadline_problem(self.job))
            return False
        return await self._is_ours(await read_job(self._store, self.job))

    async def _beat(self) -> bool:
        return await self._is_ours(
            await retry_until_available(self._store.jobs.beat, self.job.id, self.job.attempt)
        )

    async def _report(self, data: str) -> bool:
        is_ours = await retry_until_available(
            self._store.jobs.report, self.job.id, self.job.attempt, "progress", data
        )
        self._context.notifications.changed(self.job.id)
        return is_ours

    async def _is_ours(self, job: Job | None) -> bool:
        """Return whether to go on; end the job first if its cancellation was requested."""
        if job is None or job.state != "running" or job.attempt != self.job.attempt:
            self.is_running = False
            return False
        if job.cancel_requested:
            await self._context.workers.stop(self._key)
            await self._finish("cancelled")
            return False
        return True

    async def _conclude(self, profile: Profile) -> None:
        """End the job with its profile and the plan made from it, if one is wanted."""
        if self._spec.plan is None:
            await self._finish("succeeded", profile=profile)
            return
        await self._report(event_data(step="planning"))
        search = asyncio.create_task(
            self._context.planning.from_profile(
                self.job.project_id, self._spec.plan, profile, self._spec.plan_deadline_s
            )
        )
        try:
            while not search.done():
                await asyncio.wait([search], timeout=LOOK_S)
                # The server itself is the worker now, and sends the heartbeats.
                if not search.done() and not await self._beat():
                    return
            await self._finish("succeeded", profile=profile, plan=search.result())
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - the profile is kept whatever planning raised
            await self._finish("failed", profile=profile, problem=problem_json(error))
        finally:
            # Without effect on a finished search; needed when another attempt has taken over.
            search.cancel()

    async def _finish(
        self,
        state: FinalState,
        *,
        profile: Profile | None = None,
        plan: PlanRecord | None = None,
        problem: str | None = None,
    ) -> None:
        """End the job with all its results, or with none if another attempt was faster."""
        ended = await retry_until_available(
            self._store.jobs.finish,
            self.job.id,
            self.job.attempt,
            state,
            profile=profile,
            plan=plan,
            outcome_json=problem,
        )
        self.is_running = False
        if ended is None:
            return
        self.job = ended
        self._record_end(ended)
        # Remembered after the end is committed: a lost note costs a repeated measurement, but a
        # note without a stored document would be wrong.
        remember = self._store.reuse.remember
        project = ended.project_id
        spec = self._spec
        if profile is not None:
            found = profile.content_id()
            await retry_until_available(remember, project, "profile", spec.measure_digest, found)
        if plan is not None and is_final(plan) and spec.plan_digest and ended.result_id is not None:
            await retry_until_available(
                remember, project, "plan", spec.plan_digest, ended.result_id
            )
        self._context.notifications.changed(self.job.id)

    def _record_end(self, job: Job) -> None:
        """Write the end to log and metrics."""
        duration_s = 0.0
        if job.started_at is not None and job.finished_at is not None:
            duration_s = (job.finished_at - job.started_at).total_seconds()
        self._context.metrics.job_ended(job.kind, job.state, duration_s)
        values = {"state": job.state, "attempt": job.attempt, "duration_s": duration_s}
        _log.info("job ended", extra=values)

    async def _requeue_or_fail(self, why: str) -> None:
        await requeue_or_fail(self._context, self.job, why)
        self.is_running = False

    async def _next_message(self, timeout_s: float) -> WorkerMessage | None:
        """Return the worker's next message; `None` after a timeout or `check_now`."""
        try:
            message = await asyncio.wait_for(self._inbox.get(), timeout_s)
        except TimeoutError:
            return None
        if message is not None:
            self._last_message_s = time.monotonic()
        return message


async def retry_until_available(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a method of the store in a thread, again and again until the database answers."""
    while True:
        try:
            return await run_in_threadpool(call, *args, **kwargs)
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)


async def read_job(store: Store, job: Job) -> Job:
    """Return a job as its row is now."""
    return await retry_until_available(store.jobs.get, job.project_id, job.id)


async def requeue_or_fail(context: JobContext, job: Job, why: str) -> None:
    """Queue a job whose worker was lost again, or end it after too many attempts."""
    jobs = context.store.jobs
    if job.cancel_requested:
        await retry_until_available(jobs.finish, job.id, job.attempt, "cancelled")
    # Otherwise a model that kills its worker would go from one to the next forever.
    elif job.attempt >= context.max_attempts:
        error = WorkerGaveOut(f"all {job.attempt} attempts lost their worker; the last one: {why}")
        problem = problem_json(error)
        await retry_until_available(
            jobs.finish, job.id, job.attempt, "failed", outcome_json=problem
        )
    else:
        await retry_until_available(jobs.requeue, job.id, job.attempt)
    context.notifications.changed(job.id)


def is_late(job: Job, now: datetime) -> bool:
    """Return True if a job's deadline has passed."""
    return job.deadline_at is not None and now >= job.deadline_at


def deadline_problem(job: Job) -> str:
    """Return the problem of a job that missed its deadline, as its row stores it."""
    what = "measured" if job.started_at is not None else "started"
    return problem_json(
        DeadlineExceeded(
            f"the job was not {what} before its deadline; try again, add a worker that offers "
            f"{job.needs}, or measure elsewhere and post the profile"
        )
    )
