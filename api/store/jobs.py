"""Stored jobs: a table of their present states and a table of their events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, func, insert, select, update

from ...core.profile.profile import Profile
from ...core.service.documents import PlanRecord
from .database import Database, new_id
from .documents import DocumentStore
from .errors import RecordNotFound, TooManyJobs
from .records import (
    MAX_PROGRESS_EVENTS,
    UNFINISHED,
    FinalState,
    Job,
    JobRequest,
    JobState,
    Page,
    StoredJobEvent,
)
from .tables import JOB_EVENTS, JOBS, PROJECTS

JOB_COLUMNS = tuple(column for column in JOBS.c if column.name != "request_json")
"""All columns but the request, which may have megabytes and only the runner reads."""


MAX_ENDED_REQUEST = 10_000
"""Characters of a request that a job's row keeps when the job ends; longer ones are dropped.

They contain a captured model, and nothing but the job's run needs that.
"""


class JobStore:
    """Jobs and their events.

    A worker's claim on a job is its attempt number. `start` begins a new attempt; from then on
    everything an earlier attempt reports is rejected, results included. So of any number of
    workers that believe they run a job, at most one commits its end.
    """

    def __init__(self, database: Database, documents: DocumentStore) -> None:
        self._database, self._documents = database, documents

    def submit(
        self,
        project_id: str,
        request: JobRequest,
        *,
        max_unfinished: int | None = None,
        max_of_project: int | None = None,
    ) -> Job:
        """Queue a job; if its ``submit_key`` is known, return that job in whatever state it is.

        ``max_unfinished`` limits the unfinished jobs of the same API key (of the project, for a
        request without a key), ``max_of_project`` those of the project.

        Raises:
            RecordNotFound: There is no such project.
            TooManyJobs: A limit is reached. Limits are exact under concurrency.
        """
        with self._database.write() as connection:
            # The lock on the project's row serialises its submissions: no two of them can both
            # count one job too few, or both miss the other's submit_key.
            owner = select(PROJECTS.c.id).where(PROJECTS.c.id == project_id)
            if connection.execute(owner.with_for_update(key_share=True)).first() is None:
                raise RecordNotFound("project", project_id)
            if request.submit_key is not None:
                same = (JOBS.c.project_id == project_id) & (JOBS.c.submit_key == request.submit_key)
                known = connection.execute(select(*JOB_COLUMNS).where(same)).first()
                if known is not None:
                    return _as_job(known)
            _check_unfinished(connection, project_id, request.key_id, max_unfinished)
            _check_unfinished(connection, project_id, None, max_of_project)
            now = self._database.now()
            values = {
                **dict(request),
                "project_id": project_id,
                "id": new_id("job"),
                "created_at": now,
                "state": "queued",
                "attempt": 0,
                "cancel_requested": False,
                "num_events": 1,
            }
            row = connection.execute(insert(JOBS).values(**values).returning(*JOB_COLUMNS)).one()
            return _add_event(connection, now, row, "queued")

    def get(self, project_id: str, job_id: str) -> Job:
        """Return a job. Raises: RecordNotFound."""
        with self._database.read() as connection:
            return _find_job(connection, project_id, job_id)

    def list(
        self,
        project_id: str,
        *,
        limit: int,
        cursor: str | None = None,
        state: JobState | None = None,
    ) -> Page[Job]:
        """Return at most ``limit`` jobs, newest first; pages work as in `DocumentStore`."""
        rows = select(*JOB_COLUMNS).where(JOBS.c.project_id == project_id)
        if state is not None:
            rows = rows.where(JOBS.c.state == state)
        return self._database.fetch_page(rows, JOBS, _as_job, limit=limit, cursor=cursor)

    def request_json(self, job_id: str) -> str:
        """Return the request of a job of any project; empty if it was long and the job has ended.

        Raises: RecordNotFound.
        """
        with self._database.read() as connection:
            wanted = select(JOBS.c.request_json).where(JOBS.c.id == job_id)
            request_json = connection.execute(wanted).scalar()
        if request_json is None:
            raise RecordNotFound("job", job_id)
        return str(request_json)

    def counts(self) -> dict[tuple[str, JobState], int]:
        """Return the number of jobs of all projects, by kind and state."""
        columns = JOBS.c.kind, JOBS.c.state
        statement = select(*columns, func.count()).group_by(*columns)
        with self._database.read() as connection:
            return {(kind, state): number for kind, state, number in connection.execute(statement)}

    def unfinished(self) -> Sequence[Job]:
        """Return the queued and running jobs of all projects, oldest first."""
        rows = select(*JOB_COLUMNS).where(JOBS.c.state.in_(UNFINISHED)).order_by(JOBS.c.position)
        with self._database.read() as connection:
            return [_as_job(row) for row in connection.execute(rows)]

    def unfinished_like(self, project_id: str, request_digest: str) -> Job | None:
        """Return the oldest unfinished job with that digest, which an equal request can join."""
        rows = select(*JOB_COLUMNS).where(
            JOBS.c.project_id == project_id,
            JOBS.c.request_digest == request_digest,
            JOBS.c.state.in_(UNFINISHED),
            JOBS.c.cancel_requested.is_(False),
        )
        with self._database.read() as connection:
            row = connection.execute(rows.order_by(JOBS.c.position).limit(1)).first()
        return None if row is None else _as_job(row)

    def start(self, job_id: str, *, attempt: int, worker: str) -> Job | None:
        """Begin the attempt after ``attempt``, the number that the caller read.

        Return `None` if another server began it first, or the job has ended or is being cancelled.
        """
        with self._database.write() as connection:
            now = self._database.now()
            # Comparing the attempt decides between servers that start a job at once. The state
            # may be "running": a new attempt takes the job over from one that was lost.
            return _change(
                connection,
                now,
                job_id,
                "started",
                JOBS.c.attempt == attempt,
                JOBS.c.state.in_(UNFINISHED),
                JOBS.c.cancel_requested.is_(False),
                state="running",
                attempt=attempt + 1,
                worker=worker,
                started_at=now,
                heartbeat_at=now,
            )

    def requeue(self, job_id: str, attempt: int) -> Job | None:
        """Give up an attempt and queue the job again, or end it if it is being cancelled.

        Return `None` if the attempt is no longer the present one.
        """
        with self._database.write() as connection:
            now, expected = self._database.now(), _is_running(attempt)
            asked = select(JOBS.c.cancel_requested).where(JOBS.c.id == job_id, *expected)
            # Locked: a cancellation between this look and the change would be forgotten.
            if connection.execute(asked.with_for_update()).scalar():
                event, values = "cancelled", _end("cancelled", now)
            else:
                event, values = "requeued", {"state": "queued", "worker": None}
            return _change(connection, now, job_id, event, *expected, **values)

    def beat(self, job_id: str, attempt: int) -> Job | None:
        """Record a heartbeat and return the job, which may ask to be cancelled.

        Return `None` if the attempt is no longer the present one; its worker must stop.
        """
        with self._database.write() as connection:
            row = _note_heartbeat(connection, self._database.now(), job_id, attempt)
        return None if row is None else _as_job(row)

    def report(self, job_id: str, attempt: int, kind: str, data_json: str = "{}") -> bool:
        """Add an event, e.g. ``progress``, which counts as a heartbeat.

        Return `False` where `beat` returns `None`. Events beyond `MAX_PROGRESS_EVENTS` are dropped
        without changing the answer.
        """
        with self._database.write() as connection:
            now = self._database.now()
            row = _note_heartbeat(connection, now, job_id, attempt)
            if row is not None and row.num_events < MAX_PROGRESS_EVENTS:
                expected = _is_running(attempt)
                _change(connection, now, job_id, kind, *expected, data_json=data_json)
        return row is not None

    def finish(
        self,
        job_id: str,
        attempt: int,
        state: FinalState,
        *,
        profile: Profile | None = None,
        plan: PlanRecord | None = None,
        result_id: str | None = None,
        outcome_json: str | None = None,
    ) -> Job | None:
        """End a running attempt and store its results, in one transaction.

        The job's result is the plan; without one the profile, else the document named by
        ``result_id``, which is stored already (a reused answer).

        Return `None`, with nothing stored, if the attempt is no longer the present one.

        Raises:
            RecordNotFound: The plan's profile is neither stored nor given.
        """
        with self._database.write() as connection:
            now = self._database.now()
            # The change of state comes first: it locks the row, so that of two attempts that
            # end at once the later one finds the job ended and stores nothing.
            values = {**_end(state, now), "outcome_json": outcome_json}
            job = _change(connection, now, job_id, state, *_is_running(attempt), **values)
            if job is None:
                return None
            for document in (profile, plan):  # the plan last: it names its profile
                if document is not None:
                    result_id = self._documents.insert(connection, job.project_id, document).id
            change = update(JOBS).where(JOBS.c.id == job_id).values(result_id=result_id)
            return _as_job(connection.execute(change.returning(*JOB_COLUMNS)).one())

    def request_cancel(self, project_id: str, job_id: str) -> Job:
        """Cancel a queued job, or ask a running one's worker to stop; an ended job stays as it is.

        Raises: RecordNotFound.
        """
        with self._database.write() as connection:
            _find_job(connection, project_id, job_id, locked=True)
            now = self._database.now()
            queued = JOBS.c.state == "queued"
            values = {**_end("cancelled", now), "cancel_requested": True}
            if _change(connection, now, job_id, "cancelled", queued, **values) is None:
                running = (JOBS.c.state == "running", JOBS.c.cancel_requested.is_(False))
                event = "cancel-requested"
                _change(connection, now, job_id, event, *running, cancel_requested=True)
            return _find_job(connection, project_id, job_id)

    def events(
        self, project_id: str, job_id: str, *, after: int = 0, limit: int = 500
    ) -> Sequence[StoredJobEvent]:
        """Return the events after number ``after``, in order. Raises: RecordNotFound."""
        rows = select(*(JOB_EVENTS.c[name] for name in StoredJobEvent.model_fields))
        rows = rows.where(JOB_EVENTS.c.job_id == job_id, JOB_EVENTS.c.number > after)
        with self._database.read() as connection:
            _find_job(connection, project_id, job_id)
            found = connection.execute(rows.order_by(JOB_EVENTS.c.number).limit(limit)).all()
        return [StoredJobEvent.model_validate(dict(row._mapping)) for row in found]

    def latest(self, job_ids: Sequence[str], kind: str) -> dict[str, str]:
        """Return the JSON data of each job's last event of a kind, for jobs that have one."""
        last = select(JOB_EVENTS.c.job_id, func.max(JOB_EVENTS.c.number).label("number"))
        last = last.where(JOB_EVENTS.c.job_id.in_(job_ids), JOB_EVENTS.c.kind == kind)
        found = last.group_by(JOB_EVENTS.c.job_id).subquery()
        both = (JOB_EVENTS.c.job_id == found.c.job_id) & (JOB_EVENTS.c.number == found.c.number)
        rows = select(JOB_EVENTS.c.job_id, JOB_EVENTS.c.data_json).join(found, both)
        with self._database.read() as connection:
            return {job_id: data_json for job_id, data_json in connection.execute(rows)}


def _check_unfinished(
    connection: Connection, project_id: str, key_id: str | None, limit: int | None
) -> None:
    """Compare the unfinished jobs of a key, or of a whole project, with a limit."""
    mine = [JOBS.c.project_id == project_id, JOBS.c.state.in_(UNFINISHED)]
    if key_id is not None:
        mine.append(JOBS.c.key_id == key_id)
    counted = select(func.count()).select_from(JOBS).where(*mine)
    if limit is not None and connection.execute(counted).scalar_one() >= limit:
        raise TooManyJobs(limit, "project" if key_id is None else "key")


def _change(
    connection: Connection,
    now: datetime,
    job_id: str,
    event: str,
    *expected: ColumnElement[bool],
    data_json: str = "{}",
    **values: Any,
) -> Job | None:
    """Change a job under conditions and record the event; return `None` if they do not hold.

    Condition and change are one statement, which makes every transition atomic without a lock
    held across statements, on SQLite and PostgreSQL alike.
    """
    change = update(JOBS).where(JOBS.c.id == job_id, *expected)
    change = change.values(num_events=JOBS.c.num_events + 1, **values)
    row = connection.execute(change.returning(*JOB_COLUMNS)).first()
    return None if row is None else _add_event(connection, now, row, event, data_json)


def _add_event(
    connection: Connection, now: datetime, job: Row[Any], kind: str, data_json: str = "{}"
) -> Job:
    """Record the event that brought a job's row to its present state, and return the job."""
    event = insert(JOB_EVENTS).values(
        job_id=job.id,
        number=job.num_events,  # counted in the row just updated: numbers have no gaps
        created_at=now,
        attempt=job.attempt,
        kind=kind,
        data_json=data_json,
    )
    connection.execute(event)
    return _as_job(job)


def _note_heartbeat(
    connection: Connection, now: datetime, job_id: str, attempt: int
) -> Row[Any] | None:
    alive = update(JOBS).where(JOBS.c.id == job_id, *_is_running(attempt))
    return connection.execute(alive.values(heartbeat_at=now).returning(*JOB_COLUMNS)).first()


def _is_running(attempt: int) -> tuple[ColumnElement[bool], ...]:
    return JOBS.c.attempt == attempt, JOBS.c.state == "running"


def _end(state: FinalState, now: datetime) -> dict[str, Any]:
    """Return the column values of a job's end; only a success keeps its ``submit_key``.

    A long request is dropped (`MAX_ENDED_REQUEST`).
    """
    freed = {} if state == "succeeded" else {"submit_key": None}
    request_json = JOBS.c.request_json
    kept = case((func.length(request_json) > MAX_ENDED_REQUEST, ""), else_=request_json)
    return {"state": state, "finished_at": now, "request_json": kept, **freed}


def _find_job(connection: Connection, project_id: str, job_id: str, *, locked: bool = False) -> Job:
    """Return a project's job, optionally locked until the transaction ends."""
    mine = select(*JOB_COLUMNS).where(JOBS.c.project_id == project_id, JOBS.c.id == job_id)
    row = connection.execute(mine.with_for_update() if locked else mine).first()
    if row is None:
        raise RecordNotFound("job", job_id)
    return _as_job(row)


def _as_job(row: Row[Any]) -> Job:
    return Job.model_validate({name: row._mapping[name] for name in Job.model_fields})
