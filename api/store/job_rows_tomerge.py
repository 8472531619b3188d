"""One change of one job, in a transaction of the caller's.

Each is one UPDATE that names the state and the attempt it expects, counts the job's events and
so locks its row: of two changes at once the second sees what the first left, and events are
numbered in the order they are committed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, insert, select, update

from .errors import NotFound
from .job_records_tomerge import Job
from .tables import JOB_EVENTS, JOBS

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
