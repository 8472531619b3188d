"""Runner of all jobs in the store: those submitted here, and those other servers left behind."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from ..errors import JobUnreadable, WorkersUnavailable
from ..fair_limits import FairTurns
from ..store.errors import StoreUnavailable
from ..store.records import Job, Retention
from ..telemetry.tracing import bind, span
from .async_workers import RECONNECT_S
from .attempt import (
    GIVE_BACK_S,
    JobAttempt,
    JobContext,
    deadline_problem,
    is_late,
    read_job,
    requeue_or_fail,
    retry_until_available,
)
from .outcome import problem_json
from .requests import JobSpec

SWEEP_S = 5.0
"""Interval at which the table is searched for jobs that no server runs."""

ORPHAN_S = 30.0
"""A job queued on another server is taken over after this; whoever starts it first runs it."""

EXPIRE_S = 3600.0
"""Interval at which old rows are removed from the store."""

UNREADABLE = JobUnreadable(
    "this server cannot read the job's request, which another release wrote; submit it again"
)

_log = logging.getLogger(__name__)


class JobRunner:
    """Runner of jobs on one event loop.

    Everything it knows is in the store, so a killed server loses nothing: the next one, or
    another beside it, continues.

    Rows past their ``retention`` are removed from the store.
    """

    def __init__(self, context: JobContext, retention: Retention | None = None) -> None:
        self._context, self._store, self._workers = context, context.store, context.workers
        self._notifications = context.notifications
        self._retention = retention or Retention(jobs_days=None, audit_days=None)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, JobAttempt] = {}
        # Weak values: locks and turns exist for as long as some job holds or awaits them. Otherwise
        # a client that names ever new resources would leave an entry for each.
        self._locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        # By resource: jobs wait here until their project's turn, and only then at the workers.
        self._turns: weakref.WeakValueDictionary[str, FairTurns] = weakref.WeakValueDictionary()
        self._background: list[asyncio.Task[None]] = []
        self._is_first_sweep = True

    async def start(self) -> None:
        """Take up unfinished jobs now and at every sweep."""
        sweep = self._repeat(self._sweep, "jobs cannot be swept", SWEEP_S)
        expire = self._repeat(self._expire, "old rows were not removed", EXPIRE_S, delay_s=EXPIRE_S)
        self._background = [
            asyncio.create_task(sweep, name="jobs-sweep"),
            asyncio.create_task(expire, name="store-expire"),
        ]

    def take(self, job: Job) -> None:
        """Run a job, unless it is running here or has ended."""
        if job.id in self._tasks or job.is_finished or self._notifications.is_stopped:
            return
        task = asyncio.create_task(self._run(job), name=job.id)
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))

    def cancellation_requested(self, job_id: str) -> None:
        """React to a request to cancel a job, which the store has noted."""
        attempt = self._attempts.get(job_id)
        if attempt is not None:
            attempt.check_now()
        self._notifications.changed(job_id)

    def message(self, job: Job) -> str | None:
        """Return why a queued job cannot run now and what would help, if so."""
        if job.state != "queued" or job.needs is None:
            return None
        return self._workers.message(job.needs)

    async def is_unserved(self, job: Job) -> bool:
        """Return True if a job is queued for a resource that no worker offers at present."""
        if job.state != "queued" or job.needs is None or self._workers.has(job.needs):
            return False
        await self._workers.refresh()
        return self._workers.trouble is None and not self._workers.has(job.needs)

    async def stop(self) -> None:
        """Stop all attempts and queue their jobs again for the next server."""
        self._notifications.stop()
        # Before the tasks are cancelled: an attempt interrupted while it starts removes itself.
        attempts = list(self._attempts.values())
        running = [*self._background, *self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for attempt in attempts:
            with suppress(StoreUnavailable, TimeoutError):
                await asyncio.wait_for(attempt.give_back(), 2 * GIVE_BACK_S)
        await self._workers.close()

    async def _run(self, job: Job) -> None:
        """Attempt a job until it has ended, with its ids bound to all log lines and spans."""
        ids = {"job_id": job.id, "project_id": job.project_id, "key_id": job.key_id}
        with bind(**ids), span("stagewright.job", job_id=job.id, kind=job.kind):
            while not job.is_finished:
                try:
                    await self._attempt(job)
                except WorkersUnavailable as error:
                    _log.warning("jobs wait: %s", error)
                except Exception:  # noqa: BLE001 - a bug must not leave a job unfinished forever
                    _log.exception("job %s", job.id)
                    await asyncio.sleep(RECONNECT_S)
                job = await read_job(self._store, job)
                if job.state == "running":  # another server's attempt
                    return

    async def _attempt(self, job: Job) -> None:
        spec = await self._read_spec(job)
        if spec is None:
            return
        # Single flight: jobs with equal measurements wait for the first and reuse its profile.
        lock = self._locks.setdefault((job.project_id, spec.measure_digest), asyncio.Lock())
        async with lock:
            job = await read_job(self._store, job)
            # It may have been cancelled or taken by another server while it waited for the lock.
            if job.state != "queued":
                return
            if is_late(job, self._context.now()):
                await self._end_queued(job, deadline_problem(job))
                return
            if await self._reuse(job, spec):
                return
            del spec  # it may have megabytes, and a queue may be long
            await self._workers.until_reached(job.needs)
            # Until its turn a job is watched by the sweep alone, and what ends it is in its row.
            async with self._turns_for(job.needs).place(job.project_id):
                job, spec = await read_job(self._store, job), await self._read_spec(job)
                if job.state == "queued" and spec is not None:
                    await self._hand_to_worker(job, spec)

    async def _hand_to_worker(self, job: Job, spec: JobSpec) -> None:
        attempt = JobAttempt(job, spec, self._context)
        self._attempts[job.id] = attempt
        try:
            await attempt.run()
        finally:
            if not attempt.is_running:  # else `stop` gives the job back
                self._attempts.pop(job.id, None)

    async def _read_spec(self, job: Job) -> JobSpec | None:
        """Return a job's request; end the job and return `None` if it cannot be read."""
        request_json = await retry_until_available(self._store.jobs.request_json, job.id)
        try:
            return await run_in_threadpool(JobSpec.model_validate_json, request_json)
        except ValidationError as error:
            kinds = sorted({item["type"] for item in error.errors(include_input=False)})
            _log.error("job %s cannot be read: %s", job.id, ", ".join(kinds))
            await self._end_queued(job, problem_json(UNREADABLE))
            return None

    def _turns_for(self, needs: str | None) -> FairTurns:
        """Return the places of jobs for a resource, as many as there are workers and one more.

        One more because a job that plans its measured model needs no worker any longer.
        """
        turns = self._turns.setdefault(needs or "", FairTurns(1))
        turns.resize(self._workers.count(needs) + 1)
        return turns

    async def _reuse(self, job: Job, spec: JobSpec) -> bool:
        """End the job with a profile measured while it waited; return whether there was one."""
        if spec.fresh:
            return False
        found = await retry_until_available(
            self._store.reuse.recall, job.project_id, "profile", spec.measure_digest
        )
        if found is None:
            return False
        stored = await retry_until_available(self._store.documents.profile, job.project_id, found)
        return await JobAttempt(job, spec, self._context).finish_with(stored.profile)

    async def _end_queued(self, job: Job, problem: str) -> None:
        """Fail a job that has not been started."""
        started = await retry_until_available(
            self._store.jobs.start, job.id, attempt=job.attempt, worker="nobody"
        )
        if started is not None:
            await retry_until_available(
                self._store.jobs.finish, job.id, started.attempt, "failed", outcome_json=problem
            )
        self._notifications.changed(job.id)

    async def _repeat(
        self,
        work: Callable[[], Awaitable[None]],
        complaint: str,
        pause_s: float,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """Do background work forever; errors are logged and must not end it."""
        await asyncio.sleep(delay_s)
        while True:
            try:
                await work()
            except StoreUnavailable as error:
                _log.warning("%s: %s", complaint, error)
            except Exception:  # noqa: BLE001 - the next time may be better
                _log.exception(complaint)
            await asyncio.sleep(pause_s)

    async def _sweep(self) -> None:
        """Take up jobs that no server runs."""
        for job in await run_in_threadpool(self._store.jobs.unfinished):
            try:
                await self._look_after(job)
            except StoreUnavailable:
                raise
            except Exception:  # noqa: BLE001 - one job must not hide the others
                _log.exception("job %s cannot be looked after", job.id)
        self._is_first_sweep = False
        if self._tasks and self._workers.trouble is None:
            await self._workers.refresh(skip_if_busy=True)
            for needs in list(self._turns):
                self._turns_for(needs)

    async def _expire(self) -> None:
        await run_in_threadpool(self._store.expire, self._retention)

    async def _look_after(self, job: Job) -> None:
        now = self._context.now()
        age, silence_s = now - job.created_at, self._context.silence_s
        if job.state == "queued" and is_late(job, now):
            await self._end_queued(job, deadline_problem(job))
        elif job.id in self._tasks:
            return
        elif job.state == "queued":
            # A young job without attempts is most likely about to be run by the server that it
            # was submitted to, unless this server has just started: then it may be our own.
            if self._is_first_sweep or job.attempt or age > timedelta(seconds=ORPHAN_S):
                self.take(job)
        # Running, but without heartbeats: its server was lost.
        elif now - (job.heartbeat_at or now) > timedelta(seconds=silence_s):
            why = f"the server that ran it was lost {silence_s:g} s ago"
            await requeue_or_fail(self._context, job, why)
            self.take(await read_job(self._store, job))
