"""One attempt at one job: a task given to a worker, and what it says written to the job's row."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import ParamSpec, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded
from ...core.profile.profile import Profile
from ...core.service.plans import PlanRecord
from ..planning.cache_keys import is_final
from ..planning.requests import PlanRequest
from ..store.errors import StoreUnavailable
from ..store.records import FinalState, Job
from ..store.store import Store
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import span
from .async_workers import AsyncWorkers
from .job_spec import JobSpec
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
from .outcome import as_data, as_json, new_problem, printable, problem_from_failure, problem_of

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RETRY_S = 1.0
"""Until a database that does not answer is asked again."""

LOOK_S = 1.0
"""How often a silent worker, and a deadline, are looked at."""

GIVE_BACK_S = 5.0
"""What a database gets to answer in when the server stops."""

QUEUED_LOOK_S = 5.0
"""How often the row of a job that waits for a worker is read: another server may end it."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often.

    Attributes:
        attempts: A job whose worker was lost so often is given up.
        silence_s: A worker that says nothing for so long is taken for dead.
    """

    attempts: int = 5
    silence_s: float = 15.0


class JobAttempt:
    """Lives on the server's event loop. The store alone decides whose word counts.

    Args:
        job: As it is queued.
        work: What it is to do.
        store: Has its row.
        workers: Run it.
        plans: Plan from what was measured.
        retry_policy: See there.
        now: The store's clock.
        changed: Called after anything happened to the job.
        metrics: WorkerMessage how long it waited and took.
    """

    def __init__(
        self,
        job: Job,
        work: JobSpec,
        *,
        store: Store,
        workers: AsyncWorkers,
        plans: Plans,
        retry_policy: RetryPolicy,
        now: Callable[[], datetime],
        changed: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self.job = job
        self.is_running = False
        self._key = f"{job.id}-{job.attempt + 1}-{secrets.token_hex(4)}"
        self._work, self._store, self._workers = work, store, workers
        self._plans, self._rules, self._now, self._changed = plans, retry_policy, now, changed
        self._metrics = metrics
        self._inbox: asyncio.Queue[WorkerMessage | None] = asyncio.Queue()
        self._heard_s = time.monotonic()
        self._beginning: asyncio.Future[Job | None] | None = None

    def look(self) -> None:
        """Have the row read again now: somebody asked for the job's end."""
        self._inbox.put_nowait(None)

    async def run(self, setup: object) -> None:
        """Until the job has ended, is queued again, or is another's.

        Raises:
            WorkersUnavailable: Nobody takes it.
        """
        loop = asyncio.get_running_loop()

        def tell(told: WorkerMessage) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, told)

        request_json = await run_in_threadpool(self._work.measure.model_dump_json)
        task = WorkerTask(self._key, request_json, self.job.needs or "", setup)
        try:
            await self._workers.submit(task, tell)
            if await self._begun():
                with span("stagewright.measure", attempt=self.job.attempt):
                    await self._follow_to_its_end()
        finally:
            await self._workers.stop(self._key)

    async def answered_by(self, profile: Profile) -> bool:
        """End the job with what another measured; whether it was still to be begun."""
        if not await self._start("reuse"):
            return False
        await self._conclude(profile)
        self.is_running = False
        return True

    async def give_back(self) -> None:
        """Queue the job again: this server stops."""
        job = self.job if self.is_running else None
        if self._beginning is not None:  # it was stopped while it was being written down
            await asyncio.wait([self._beginning], timeout=GIVE_BACK_S)
            job = self._beginning.result() if self._beginning.done() else None
        if job is not None:
            await run_in_threadpool(self._store.jobs.requeue, job.id, job.attempt)

    async def _begun(self) -> bool:
        """Wait until a worker begins; whether the attempt is ours then."""
        while True:
            told = await self._next(QUEUED_LOOK_S)
            if isinstance(told, WorkerLost):
                await asyncio.sleep(RETRY_S)
                return False
            if told is not None:
                break
            if await self._is_over():
                return False
        if not await self._start(told.worker if isinstance(told, WorkerStarted) else "unknown"):
            return False
        if not isinstance(told, WorkerStarted):
            self._inbox.put_nowait(told)
        return True

    async def _start(self, worker: str) -> bool:
        """Make the attempt the present one; whether nobody was first."""
        job = self.job
        self._beginning = asyncio.ensure_future(
            retry_until_available(
                self._store.jobs.start, job.id, attempt=job.attempt, worker=worker
            )
        )
        started = await asyncio.shield(self._beginning)
        self._beginning = None
        if started is None:
            return False
        self.job, self.is_running = started, True
        _log.info("job started", extra={"attempt": started.attempt, "worker": worker})
        if started.attempt == 1 and started.started_at is not None:
            waited = started.started_at - started.created_at
            self._metrics.job_started(started.kind, waited.total_seconds())
        self._changed(job.id)
        return True

    async def _is_over(self) -> bool:
        """Whether the queued job ended meanwhile, here or on another server, or is too late."""
        job = await retry_until_available(self._store.jobs.get, self.job.project_id, self.job.id)
        return job.state != "queued" or job.attempt != self.job.attempt or is_late(job, self._now())

    async def _follow_to_its_end(self) -> None:
        """Whatever happens, an attempt that was begun here ends here."""
        try:
            await self._follow()
        except Exception as error:  # noqa: BLE001 - a fault of ours, which would come again
            await self._finish("failed", problem=as_json(problem_of(error)))
        self.is_running = False

    async def _follow(self) -> None:
        """Write down what the worker says, to the end."""
        while not self.job.is_finished:
            told = await self._next(LOOK_S)
            match told:
                case ProfileMeasured(profile_json):
                    read = Profile.model_validate_json
                    await self._conclude(await run_in_threadpool(read, profile_json))
                    return
                case TaskFailed():
                    await self._finish("failed", problem=as_json(problem_from_failure(told)))
                    return
                case WorkerLost(why):
                    await self._lost(why)
                    return
                case WorkerProgress(done, total, layer):
                    words = printable(layer)
                    data = as_data(step="measuring", done=done, total=total, layer=words)
                    if not await self._report(data):
                        return
                case Heartbeat():
                    if not await self._beat():
                        return
                case _:
                    if not await self._looked_at():
                        return

    async def _looked_at(self) -> bool:
        """Whether to go on with a worker that said nothing for a moment."""
        if time.monotonic() - self._heard_s > self._rules.silence_s:
            await self._lost(f"its worker said nothing for {self._rules.silence_s:g} s")
            return False
        if is_late(self.job, self._now()):
            await self._finish("failed", problem=deadline_problem(self.job))
            return False
        job = await retry_until_available(self._store.jobs.get, self.job.project_id, self.job.id)
        return await self._is_ours(job)

    async def _beat(self) -> bool:
        return await self._is_ours(
            await retry_until_available(self._store.jobs.beat, self.job.id, self.job.attempt)
        )

    async def _report(self, data: str) -> bool:
        is_ours = await retry_until_available(
            self._store.jobs.report, self.job.id, self.job.attempt, "progress", data
        )
        self._changed(self.job.id)
        return is_ours

    async def _is_ours(self, job: Job | None) -> bool:
        """Whether the attempt is still the present one; ends it if somebody asked for that."""
        if job is None or job.state != "running" or job.attempt != self.job.attempt:
            self.is_running = False
            return False
        if job.cancel_requested:
            await self._workers.stop(self._key)
            await self._finish("cancelled")
            return False
        return True

    async def _conclude(self, profile: Profile) -> None:
        if self._work.plan is None:
            await self._finish("succeeded", profile=profile)
            return
        await self._report(as_data(step="planning"))
        planning = asyncio.create_task(
            self._plans.from_profile(self._work.plan, profile, self._work.plan_deadline_s)
        )
        try:
            while not planning.done():
                await asyncio.wait([planning], timeout=LOOK_S)
                if not planning.done() and not await self._beat():
                    return
            await self._finish("succeeded", profile=profile, plan=planning.result())
        except Exception as error:
            if isinstance(error, StoreUnavailable):
                raise
            await self._finish("failed", profile=profile, problem=as_json(problem_of(error)))
        finally:
            planning.cancel()

    async def _finish(
        self,
        state: FinalState,
        *,
        profile: Profile | None = None,
        plan: PlanRecord | None = None,
        problem: str | None = None,
    ) -> None:
        """End the job, with all it made or nothing."""
        ended = await retry_until_available(
            self._store.jobs.finish,
            self.job.id,
            self.job.attempt,
            state,
            profiles=() if profile is None else (profile,),
            plan=plan,
            outcome_json=problem,
        )
        self.is_running = False
        if ended is None:
            return
        self.job = ended
        self._tell(ended)
        if profile is not None:
            await self._remember("profile", self._work.measure_digest, profile.content_id())
        digest = self._work.plan_digest
        if plan is not None and is_final(plan) and digest and ended.result_id is not None:
            await self._remember("plan", digest, ended.result_id)
        self._changed(self.job.id)

    def _tell(self, job: Job) -> None:
        """Log and count that it has ended."""
        took_s = 0.0
        if job.started_at is not None and job.finished_at is not None:
            took_s = (job.finished_at - job.started_at).total_seconds()
        self._metrics.job_ended(job.kind, job.state, took_s)
        told = {"state": job.state, "attempt": job.attempt, "duration_s": took_s}
        _log.info("job ended", extra=told)

    async def _remember(self, kind: str, digest: str, result_id: str) -> None:
        project = self.job.project_id
        await retry_until_available(self._store.reuse.remember, project, kind, digest, result_id)

    async def _lost(self, why: str) -> None:
        """Queue the job again, or give it up."""
        await requeue_or_fail(self._store, self.job, self._rules, why)
        self.is_running = False
        self._changed(self.job.id)

    async def _next(self, timeout_s: float) -> WorkerMessage | None:
        """What the worker says next; `None` if it says nothing for so long, or after `look`."""
        try:
            told = await asyncio.wait_for(self._inbox.get(), timeout_s)
        except TimeoutError:
            return None
        if told is not None:
            self._heard_s = time.monotonic()
        return told


async def retry_until_available(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """A call of the store, again and again until the database answers."""
    while True:
        try:
            return await run_in_threadpool(call, *args, **kwargs)
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)


async def requeue_or_fail(store: Store, job: Job, retry_policy: RetryPolicy, why: str) -> None:
    """What happens to a running job whose worker is lost."""
    if job.cancel_requested:
        await retry_until_available(store.jobs.finish, job.id, job.attempt, "cancelled")
    elif job.attempt >= retry_policy.attempts:
        detail = f"it was started {job.attempt} times, and each time its worker was lost: {why}"
        problem = as_json(new_problem(503, "worker-lost", detail))
        await retry_until_available(
            store.jobs.finish, job.id, job.attempt, "failed", outcome_json=problem
        )
    else:
        await retry_until_available(store.jobs.requeue, job.id, job.attempt)


def is_late(job: Job, now: datetime) -> bool:
    """Whether it should have ended by now."""
    return job.deadline_at is not None and now >= job.deadline_at


def deadline_problem(job: Job) -> str:
    """Why a job that is late failed."""
    what = "measured" if job.started_at is not None else "started"
    return as_json(
        problem_of(
            DeadlineExceeded(
                f"the job was not {what} before its deadline; ask again, add a worker that offers "
                f"{job.needs}, or measure elsewhere and post the profile"
            )
        )
    )


class Plans(Protocol):
    """Plans from a profile that was measured."""

    async def from_profile(
        self, request: PlanRequest, profile: Profile, deadline_s: float
    ) -> PlanRecord:
        """The answer to a request, once its model is measured; stores nothing.

        Raises:
            StagewrightError: There is none.
        """
