"""Integrity check of a database: its tables, documents and jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sqlalchemy import Connection, Table, func, select

from ...core.document import json_digest
from .database import Database
from .migrate import check_revision
from .records import UNFINISHED
from .tables import GRAPHS, JOB_EVENTS, JOBS, PLANS, PROFILES

ROWS_AT_ONCE = 50


def find_faults(database: Database) -> list[str]:
    """Describe every fault of a database; reads every document and changes nothing.

    Raises:
        InvalidInput: The database does not have this release's tables.
        StoreUnavailable: It does not answer.
    """
    check_revision(database)
    with database.snapshot() as connection:
        return [
            *([] if database.is_postgresql else _file_faults(connection)),
            *(
                fault
                for table in (PROFILES, GRAPHS, PLANS)
                for fault in _changed_documents(connection, table)
            ),
            *_job_faults(connection),
        ]


def _file_faults(connection: Connection) -> Iterator[str]:
    """Report what SQLite finds wrong with its own file."""
    for (said,) in connection.exec_driver_sql("PRAGMA integrity_check"):
        if said != "ok":
            yield f"the file is damaged: {said}"
    for row in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        yield f"row {row[1]} of {row[0]} refers to a missing row of {row[2]}"


def _changed_documents(connection: Connection, table: Table) -> Iterator[str]:
    """Report documents whose content no longer matches their ids."""
    rows = select(table.c.id, table.c.project_id, table.c.document)
    for row in connection.execute(rows.execution_options(yield_per=ROWS_AT_ONCE)):
        try:
            digest = json_digest(json.loads(row.document))
        except ValueError:
            digest = ""
        if digest != row.id.rpartition("_")[2]:
            yield f"{row.id} of {row.project_id} has been altered since it was stored"


def _job_faults(connection: Connection) -> Iterator[str]:
    num_events = (
        select(func.count())
        .select_from(JOB_EVENTS)
        .where(JOB_EVENTS.c.job_id == JOBS.c.id, JOB_EVENTS.c.number <= JOBS.c.num_events)
        .scalar_subquery()
    )
    lost = select(JOBS.c.id).where(JOBS.c.num_events != num_events)
    for row in connection.execute(lost.order_by(JOBS.c.position)):
        yield f"{row.id} has lost events"
    ended = JOBS.c.state.not_in(UNFINISHED)
    odd = select(JOBS.c.id).where(ended != JOBS.c.finished_at.is_not(None))
    for row in connection.execute(odd.order_by(JOBS.c.position)):
        yield f"{row.id} has an end time but no final state, or a final state but no end time"
