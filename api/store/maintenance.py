"""Maintenance of a database: rows past their retention period, and the check for faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, or_, select

from ...core.document import json_digest
from .database import Database
from .migrate import check_revision
from .projects import COUNTED, delete_rows, lock_projects
from .records import UNFINISHED, Retention
from .tables import ANSWERS, API_KEYS, AUDIT, GRAPHS, JOB_EVENTS, JOBS, PLANS, PROFILES, REUSE

BATCH_ROWS = 500
"""Rows removed per transaction, which is as long as a writer has to wait."""

ROWS_AT_ONCE = 50
"""Rows fetched at once; a row may have megabytes."""


def expire(database: Database, retention: Retention) -> dict[str, int]:
    """Remove expired answers and old rows in small batches; see `Store.expire`."""
    now = database.now()
    removed = {"idempotent_answers": _remove(database, ANSWERS, ANSWERS.c.expires_at <= now)}
    if retention.jobs_days is not None:
        cutoff = now - timedelta(days=retention.jobs_days)
        ended = and_(JOBS.c.state.not_in(UNFINISHED), JOBS.c.finished_at < cutoff)
        removed["jobs"] = _remove(database, JOBS, ended)
    if retention.audit_days is not None:
        cutoff = now - timedelta(days=retention.audit_days)
        removed["audit_log"] = _remove(database, AUDIT, AUDIT.c.created_at < cutoff)
    if retention.keys_days is not None:
        cutoff = now - timedelta(days=retention.keys_days)
        dead = or_(API_KEYS.c.revoked_at < cutoff, API_KEYS.c.expires_at < cutoff)
        removed["api_keys"] = _remove(database, API_KEYS, dead)
    if retention.plans_days is not None:
        cutoff = now - timedelta(days=retention.plans_days)
        has_plan = exists().where(
            PLANS.c.project_id == PROFILES.c.project_id, PLANS.c.profile_id == PROFILES.c.id
        )
        # Plans first, which keep their profiles.
        for table in (PLANS, PROFILES, GRAPHS, REUSE):
            old = table.c.created_at < cutoff
            doomed = and_(old, ~has_plan) if table is PROFILES else old
            removed[table.name] = _remove(database, table, doomed)
    return removed


def _remove(database: Database, table: Table, doomed: ColumnElement[bool]) -> int:
    """Remove all matching rows in batches and return their number."""
    total, removed = 0, BATCH_ROWS
    while removed:
        removed = _remove_batch(database, table, doomed)
        total += removed
    return total


def _remove_batch(database: Database, table: Table, doomed: ColumnElement[bool]) -> int:
    """Remove one batch; return 0 if no row matches, or all that match are locked by others."""
    key = list(table.primary_key)
    some = select(*key).where(doomed).limit(BATCH_ROWS).with_for_update(skip_locked=True)
    with database.write() as connection:
        if table in COUNTED:
            lock_projects(connection)
        rows = connection.execute(some).all()
        num_removed = 0
        for row in rows:
            this = and_(*(column == value for column, value in zip(key, row, strict=True)))
            if table is JOBS:
                mine = select(JOBS.c.id).where(this).scalar_subquery()
                connection.execute(delete(JOB_EVENTS).where(JOB_EVENTS.c.job_id == mine))
            # The condition again, now under the lock: a plan stored since the select keeps
            # its profile.
            num_removed += delete_rows(connection, table, this, doomed)
    return num_removed


def find_faults(database: Database) -> list[str]:
    """Describe every fault of a database; reads every document and changes nothing."""
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
