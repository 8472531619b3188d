"""Jobs in a table; see `job_contract.Jobs`, and `job_rows` for how a job changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.plans import PlanRecord
from .database import Database, new_id
from .documents import SqlDocuments
from .errors import NotFound, TooManyJobs
from .pagination import page
from .records import (
    MAX_PROGRESS_EVENTS,
    UNFINISHED,
    FinalState,
    Job,
    JobEvent,
    JobRequest,
    JobState,
    Page,
)
from .tables import JOB_EVENTS, JOBS, PROJECTS


class SqlJobs:
    """`job_contract.Jobs` on a database."""

    def __init__(self, database: Database, documents: SqlDocuments) -> None:
        self._database = database
        self._documents = documents

    def submit(
        self, project_id: str, request: JobRequest, *, max_unfinished: int | None = None
    ) -> Job:
        with self._database.write() as connection:
            # Submissions of a project wait here for each other, which makes the limit exact.
            owner = select(PROJECTS.c.id).where(PROJECTS.c.id == project_id)
            if connection.execute(owner.with_for_update(key_share=True)).first() is None:
                raise NotFound("project", project_id)
            same = _same_submission(connection, project_id, request)
            if same is not None:
                return as_job(same)
            if max_unfinished is not None:
                _check_unfinished(connection, project_id, request, max_unfinished)
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
            row = connection.execute(insert(JOBS).values(**values).returning(*SEEN)).one()
            add_event(connection, now, row, "queued")
            return as_job(row)

    def get(self, project_id: str, job_id: str) -> Job:
        with self._database.read() as connection:
            return as_job(job_of(connection, project_id, job_id))

    def list(
        self,
        project_id: str,
        *,
        limit: int,
        cursor: str | None = None,
        state: JobState | None = None,
    ) -> Page[Job]:
        rows = select(*SEEN).where(JOBS.c.project_id == project_id)
        if state is not None:
            rows = rows.where(JOBS.c.state == state)
        with self._database.read() as connection:
            return page(connection, rows, JOBS, as_job, limit=limit, cursor=cursor)

    def request_json(self, job_id: str) -> str:
        with self._database.read() as connection:
            found = connection.execute(select(JOBS.c.request_json).where(JOBS.c.id == job_id))
            request_json = found.scalar()
        if request_json is None:
            raise NotFound("job", job_id)
        return str(request_json)

    def counts(self) -> dict[tuple[str, JobState], int]:
        columns = JOBS.c.kind, JOBS.c.state
        statement = select(*columns, func.count()).group_by(*columns)
        with self._database.read() as connection:
            return {(kind, state): number for kind, state, number in connection.execute(statement)}

    def unfinished(self) -> Sequence[Job]:
        rows = select(*SEEN).where(JOBS.c.state.in_(UNFINISHED)).order_by(JOBS.c.position)
        with self._database.read() as connection:
            return [as_job(row) for row in connection.execute(rows)]

    def unfinished_like(self, project_id: str, request_digest: str) -> Job | None:
        rows = select(*SEEN).where(
            JOBS.c.project_id == project_id,
            JOBS.c.request_digest == request_digest,
            JOBS.c.state.in_(UNFINISHED),
            JOBS.c.cancel_requested.is_(False),
        )
        with self._database.read() as connection:
            row = connection.execute(rows.order_by(JOBS.c.position).limit(1)).first()
        return None if row is None else as_job(row)

    def start(self, job_id: str, *, attempt: int, worker: str) -> Job | None:
        now = self._database.now()
        expected = (
            JOBS.c.attempt == attempt,
            JOBS.c.state.in_(UNFINISHED),
            JOBS.c.cancel_requested.is_(False),
        )
        return self._change(
            job_id,
            "started",
            *expected,
            state="running",
            attempt=attempt + 1,
            worker=worker,
            started_at=now,
            heartbeat_at=now,
        )

    def requeue(self, job_id: str, attempt: int) -> Job | None:
        with self._database.write() as connection:
            now, expected = self._database.now(), running(attempt)
            asked = select(JOBS.c.cancel_requested).where(JOBS.c.id == job_id, *expected)
            is_unwanted = connection.execute(asked.with_for_update()).scalar()
            if is_unwanted:
                ended: dict[str, Any] = {
                    "state": "cancelled",
                    "finished_at": now,
                    "submit_key": None,
                }
                row = advance(connection, now, job_id, "cancelled", *expected, **ended)
            else:
                again: dict[str, Any] = {"state": "queued", "worker": None}
                row = advance(connection, now, job_id, "requeued", *expected, **again)
        return None if row is None else as_job(row)

    def beat(self, job_id: str, attempt: int) -> Job | None:
        with self._database.write() as connection:
            row = note_life(connection, self._database.now(), job_id, attempt)
        return None if row is None else as_job(row)

    def report(self, job_id: str, attempt: int, kind: str, data_json: str = "{}") -> bool:
        with self._database.write() as connection:
            now = self._database.now()
            row = note_life(connection, now, job_id, attempt)
            if row is not None and row.num_events < MAX_PROGRESS_EVENTS:
                expected = running(attempt)
                advance(connection, now, job_id, kind, *expected, data_json=data_json)
        return row is not None

    def finish(
        self,
        job_id: str,
        attempt: int,
        state: FinalState,
        *,
        profiles: Sequence[Profile] = (),
        graph: Graph | None = None,
        plan: PlanRecord | None = None,
        result_id: str | None = None,
        outcome_json: str | None = None,
    ) -> Job | None:
        freed: dict[str, Any] = {} if state == "succeeded" else {"submit_key": None}
        with self._database.write() as connection:
            now = self._database.now()
            row = advance(
                connection,
                now,
                job_id,
                state,
                *running(attempt),
                state=state,
                finished_at=now,
                outcome_json=outcome_json,
                **freed,
            )
            if row is None:
                return None
            made = self._keep(connection, row.project_id, profiles, graph, plan) or result_id
            result = update(JOBS).where(JOBS.c.id == job_id).values(result_id=made)
            return as_job(connection.execute(result.returning(*SEEN)).one())

    def request_cancel(self, project_id: str, job_id: str) -> Job:
        with self._database.write() as connection:
            job_of(connection, project_id, job_id, locked=True)
            queued = JOBS.c.state == "queued"
            now = self._database.now()
            ended = advance(
                connection,
                now,
                job_id,
                "cancelled",
                queued,
                state="cancelled",
                cancel_requested=True,
                finished_at=now,
                submit_key=None,
            )
            if ended is None:
                asked = (JOBS.c.state == "running", JOBS.c.cancel_requested.is_(False))
                advance(connection, now, job_id, "cancel-requested", *asked, cancel_requested=True)
            return as_job(job_of(connection, project_id, job_id))

    def events(
        self, project_id: str, job_id: str, *, after: int = 0, limit: int = 500
    ) -> Sequence[JobEvent]:
        rows = select(JOB_EVENTS).where(JOB_EVENTS.c.job_id == job_id, JOB_EVENTS.c.number > after)
        with self._database.read() as connection:
            job_of(connection, project_id, job_id)
            found = connection.execute(rows.order_by(JOB_EVENTS.c.number).limit(limit)).all()
        names = JobEvent.model_fields
        return [
            JobEvent.model_validate({name: row._mapping[name] for name in names}) for row in found
        ]

    def latest(self, job_ids: Sequence[str], kind: str) -> dict[str, str]:
        last = select(JOB_EVENTS.c.job_id, func.max(JOB_EVENTS.c.number).label("number"))
        last = last.where(JOB_EVENTS.c.job_id.in_(job_ids), JOB_EVENTS.c.kind == kind)
        found = last.group_by(JOB_EVENTS.c.job_id).subquery()
        both = (JOB_EVENTS.c.job_id == found.c.job_id) & (JOB_EVENTS.c.number == found.c.number)
        rows = select(JOB_EVENTS.c.job_id, JOB_EVENTS.c.data_json).join(found, both)
        with self._database.read() as connection:
            return {job_id: data_json for job_id, data_json in connection.execute(rows)}

    def _keep(
        self,
        connection: Connection,
        project_id: str,
        profiles: Sequence[Profile],
        graph: Graph | None,
        plan: PlanRecord | None,
    ) -> str | None:
        """Store what a job made; the id of its result."""
        made: str | None = None
        if graph is not None:
            made = self._documents.insert_graph(connection, project_id, graph).id
        # In one order for all: two jobs that store the same must not wait for each other.
        for profile in sorted(profiles, key=Profile.content_id):
            self._documents.insert_profile(connection, project_id, profile)
        if profiles:
            made = profiles[-1].content_id()
        if plan is not None:
            made = self._documents.insert_plan(connection, project_id, plan).id
        return made

    def _change(
        self, job_id: str, kind: str, *expected: ColumnElement[bool], **values: Any
    ) -> Job | None:
        with self._database.write() as connection:
            row = advance(connection, self._database.now(), job_id, kind, *expected, **values)
        return None if row is None else as_job(row)


def _same_submission(
    connection: Connection, project_id: str, request: JobRequest
) -> Row[Any] | None:
    if request.submit_key is None:
        return None
    same = (JOBS.c.project_id == project_id) & (JOBS.c.submit_key == request.submit_key)
    return connection.execute(select(*SEEN).where(same)).first()


def _check_unfinished(
    connection: Connection, project_id: str, request: JobRequest, limit: int
) -> None:
    mine = JOBS.c.project_id == project_id, JOBS.c.state.in_(UNFINISHED)
    counted = select(func.count()).select_from(JOBS).where(*mine)
    if request.key_id is not None:
        counted = counted.where(JOBS.c.key_id == request.key_id)
    if connection.execute(counted).scalar_one() >= limit:
        raise TooManyJobs(limit)


SEEN = tuple(column for column in JOBS.c if column.name != "request_json")
"""Of a job's row, what is read wherever jobs are looked at: all but the request."""


def advance(
    connection: Connection,
    now: datetime,
    job_id: str,
    kind: str,
    *expected: ColumnElement[bool],
    data_json: str = "{}",
    **values: Any,
) -> Row[Any] | None:
    """Change a job that is as expected, and note it as an event; `None` if it is not."""
    change = update(JOBS).where(JOBS.c.id == job_id, *expected)
    change = change.values(num_events=JOBS.c.num_events + 1, **values)
    row = connection.execute(change.returning(*SEEN)).first()
    if row is not None:
        add_event(connection, now, row, kind, data_json)
    return row


def add_event(
    connection: Connection, now: datetime, job: Row[Any], kind: str, data_json: str = "{}"
) -> None:
    """Note what made a job's row what it is now."""
    event = insert(JOB_EVENTS).values(
        job_id=job.id,
        number=job.num_events,
        created_at=now,
        attempt=job.attempt,
        kind=kind,
        data_json=data_json,
    )
    connection.execute(event)


def note_life(connection: Connection, now: datetime, job_id: str, attempt: int) -> Row[Any] | None:
    """A sign of life of an attempt; `None` if it is not the one running."""
    alive = update(JOBS).where(JOBS.c.id == job_id, *running(attempt)).values(heartbeat_at=now)
    return connection.execute(alive.returning(*SEEN)).first()


def running(attempt: int) -> tuple[ColumnElement[bool], ...]:
    """What holds of a job whose present attempt is that one."""
    return JOBS.c.attempt == attempt, JOBS.c.state == "running"


def job_of(
    connection: Connection, project_id: str, job_id: str, *, locked: bool = False
) -> Row[Any]:
    """A project's job.

    Args:
        connection: Where to look.
        project_id: Whose.
        job_id: Which.
        locked: Let nobody else change it before the transaction ends.

    Raises:
        NotFound: It has none of that id.
    """
    mine = select(*SEEN).where(JOBS.c.project_id == project_id, JOBS.c.id == job_id)
    row = connection.execute(mine.with_for_update() if locked else mine).first()
    if row is None:
        raise NotFound("job", job_id)
    return row


def as_job(row: Row[Any]) -> Job:
    """A row as what callers see."""
    return Job.model_validate({name: row._mapping[name] for name in Job.model_fields})
