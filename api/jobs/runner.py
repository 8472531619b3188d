"""Seeing every job of the store to its end: what is handed in, and what others left behind."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from ..errors import WorkersUnavailable
from ..store.errors import StoreUnavailable
from ..store.records import Job, Retention
from ..store.store import Store, utc_now
from ..telemetry.log_context import bind
from ..telemetry.metrics import Metrics
from ..telemetry.tracing import span
from .async_workers import AGAIN_S, AsyncWorkers
from .attempt import (
    GIVE_BACK_S,
    JobAttempt,
    Plans,
    RetryPolicy,
    deadline_problem,
    is_late,
    requeue_or_fail,
    retry_until_available,
)
from .job_spec import JobSpec, read_job_spec
from .notifications import JobNotifications
from .outcome import as_json, new_problem
from .workers import WorkerBackend

SWEEP_S = 5.0
"""How often the table is searched for what nobody runs."""

ORPHAN_S = 30.0
"""A job queued for so long on another server is taken over; if that runs it, it is first to say."""

EXPIRE_S = 3600.0
"""How often what is old is removed from the store."""

UNREADABLE = as_json(
    new_problem(
        500,
        "internal-error",
        "this server cannot read what the job is to do: another release wrote it; ask again",
    )
)

_log = logging.getLogger(__name__)


class JobRunner:
    """Runs jobs, on the event loop it is started on.

    Nothing is known here that is not in the store: a server that is killed loses nothing, and
    the next one, or another one beside it, goes on.

    Args:
        store: Has the jobs.
        workers: Run them.
        plans: Plan from what they measured.
        board: WorkerMessage of every change.
        setup: How workers measure, for `tasks.Task`.
        retry_policy: See there.
        retention: What `store.expire` removes now and then.
        now: The store's clock.
        metrics: WorkerMessage how long jobs wait and take.
    """

    def __init__(
        self,
        store: Store,
        workers: WorkerBackend,
        plans: Plans,
        board: JobNotifications,
        *,
        setup: Any = None,
        retry_policy: RetryPolicy | None = None,
        retention: Retention | None = None,
        now: Callable[[], datetime] = utc_now,
        metrics: Metrics | None = None,
    ) -> None:
        self._store, self._plans, self._board = store, plans, board
        self._workers = AsyncWorkers(workers)
        self._setup, self._rules, self._now = setup, retry_policy or RetryPolicy(), now
        self._retention = retention or Retention(jobs_days=None, audit_days=None)
        self._metrics = metrics or Metrics()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, JobAttempt] = {}
        self._flights: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take up what is unfinished, and go on looking for it."""
        self._background = [
            asyncio.create_task(self._sweep_for_ever(), name="jobs-sweep"),
            asyncio.create_task(self._expire_for_ever(), name="store-expire"),
        ]

    def take(self, job: Job) -> None:
        """Run a job, unless it is run already."""
        if job.id in self._tasks or job.is_finished or self._board.is_stopped:
            return
        task = asyncio.create_task(self._in_its_name(job), name=job.id)
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))

    def look(self, job_id: str) -> None:
        """Somebody asked for a job's end."""
        attempt = self._attempts.get(job_id)
        if attempt is not None:
            attempt.look()
        self._board.changed(job_id)

    def message(self, job: Job) -> str | None:
        """What keeps a queued job from running, and what would help."""
        if job.state != "queued" or job.needs is None:
            return None
        return self._workers.message(job.needs)

    async def is_unserved(self, job: Job) -> bool:
        """Whether a job is queued for what no worker offers just now."""
        if job.state != "queued" or job.needs is None or self._workers.has(job.needs):
            return False
        await self._workers.learn()
        return self._workers.trouble is None and not self._workers.has(job.needs)

    async def stop(self) -> None:
        """Stop what runs, and queue it again for the next server."""
        self._board.stop()
        attempts = list(self._attempts.values())
        running = [*self._background, *self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for attempt in attempts:
            with suppress(StoreUnavailable, TimeoutError):
                await asyncio.wait_for(attempt.give_back(), 2 * GIVE_BACK_S)
        await self._workers.close()

    async def _in_its_name(self, job: Job) -> None:
        """What is logged meanwhile is the job's."""
        ids = {"job_id": job.id, "project_id": job.project_id, "key_id": job.key_id}
        with bind(**ids), span("stagewright.job", job_id=job.id, kind=job.kind):
            await self._see_to(job)

    async def _see_to(self, job: Job) -> None:
        """JobAttempt a job until it has ended."""
        while not job.is_finished:
            try:
                await self._attempt(job)
            except WorkersUnavailable as error:
                _log.warning("jobs wait: %s", error)
            except Exception:  # noqa: BLE001 - a fault of ours must not leave a job for ever
                _log.exception("job %s", job.id)
                await asyncio.sleep(AGAIN_S)
            seen = await retry_until_available(self._store.jobs.get, job.project_id, job.id)
            if seen.state == "running":  # another server's now
                return
            job = seen

    async def _attempt(self, job: Job) -> None:
        request_json = await retry_until_available(self._store.jobs.request_json, job.id)
        try:
            work = await run_in_threadpool(read_job_spec, request_json)
        except ValidationError as error:
            _log.error("job %s cannot be read: %s", job.id, error)
            await self._end_queued(job, UNREADABLE)
            return
        # Jobs with the same measurement wait for the first, and then have what it found.
        lock = self._flights.setdefault((job.project_id, work.measure_digest), asyncio.Lock())
        async with lock:
            job = await retry_until_available(self._store.jobs.get, job.project_id, job.id)
            if job.state != "queued":
                return
            if is_late(job, self._now()):
                await self._end_late(job)
                return
            if await self._known(job, work):
                return
            await self._workers.until_reached(job.needs)
            attempt = self._new_attempt(job, work)
            self._attempts[job.id] = attempt
            try:
                await attempt.run(self._setup)
            finally:
                if not attempt.is_running:
                    self._attempts.pop(job.id, None)

    async def _known(self, job: Job, work: JobSpec) -> bool:
        """Whether the measurement was made while the job waited; then it is ended by that."""
        if work.fresh:
            return False
        found = await retry_until_available(
            self._store.reuse.recall, job.project_id, "profile", work.measure_digest
        )
        if found is None:
            return False
        stored = await retry_until_available(self._store.documents.profile, job.project_id, found)
        return await self._new_attempt(job, work).answered_by(stored.profile)

    def _new_attempt(self, job: Job, work: JobSpec) -> JobAttempt:
        return JobAttempt(
            job,
            work,
            store=self._store,
            workers=self._workers,
            plans=self._plans,
            retry_policy=self._rules,
            now=self._now,
            changed=self._board.changed,
            metrics=self._metrics,
        )

    async def _end_late(self, job: Job) -> None:
        await self._end_queued(job, deadline_problem(job))

    async def _end_queued(self, job: Job, problem: str) -> None:
        """End a job that nobody runs as failed."""
        started = await retry_until_available(
            self._store.jobs.start, job.id, attempt=job.attempt, worker="nobody"
        )
        if started is not None:
            await retry_until_available(
                self._store.jobs.finish, job.id, started.attempt, "failed", outcome_json=problem
            )
        self._board.changed(job.id)

    async def _sweep_for_ever(self) -> None:
        is_first = True
        while True:
            try:
                await self._sweep(is_first)
                is_first = False
            except StoreUnavailable as error:
                _log.warning("jobs cannot be looked for: %s", error)
            except Exception:  # noqa: BLE001 - one fault must not end all looking
                _log.exception("jobs cannot be looked for")
            await asyncio.sleep(SWEEP_S)

    async def _sweep(self, is_first: bool) -> None:
        """Take up what nobody runs."""
        for job in await run_in_threadpool(self._store.jobs.unfinished):
            try:
                await self._look_after(job, is_first)
            except StoreUnavailable:
                raise
            except Exception:  # noqa: BLE001 - one job must not hide the others
                _log.exception("job %s cannot be looked after", job.id)
        if self._tasks and self._workers.trouble is None:
            await self._workers.refresh()

    async def _look_after(self, job: Job, is_first: bool) -> None:
        now = self._now()
        if job.state == "queued" and is_late(job, now):
            await self._end_late(job)
        elif job.id in self._tasks:
            return
        elif job.state == "queued":
            if is_first or job.attempt or now - job.created_at > timedelta(seconds=ORPHAN_S):
                self.take(job)
        elif now - (job.heartbeat_at or now) > timedelta(seconds=self._rules.silence_s):
            why = f"the server that ran it was lost {self._rules.silence_s:g} s ago"
            await requeue_or_fail(self._store, job, self._rules, why)
            self._board.changed(job.id)
            self.take(await retry_until_available(self._store.jobs.get, job.project_id, job.id))

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            try:
                await run_in_threadpool(self._store.expire, self._retention)
            except StoreUnavailable as error:
                _log.warning("what is old was not removed: %s", error)
            except Exception:  # noqa: BLE001 - the next time may be better
                _log.exception("what is old was not removed")
