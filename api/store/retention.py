"""Removal of rows past their retention period, in small batches."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Table, and_, delete, exists, select

from .database import Database
from .records import UNFINISHED, Retention
from .tables import ANSWERS, AUDIT, GRAPHS, JOB_EVENTS, JOBS, PLANS, PROFILES, REUSE

BATCH_ROWS = 500
"""Rows removed per transaction, which is as long as a writer has to wait."""


def expire(database: Database, retention: Retention) -> dict[str, int]:
    """Remove expired answers and old rows; see `Store.expire`."""
    now = database.now()

    def before(days: float) -> datetime:
        return now - timedelta(days=days)

    removed = {"idempotent_answers": _remove(database, ANSWERS, ANSWERS.c.expires_at <= now)}
    if retention.jobs_days is not None:
        ended = and_(
            JOBS.c.state.not_in(UNFINISHED), JOBS.c.finished_at < before(retention.jobs_days)
        )
        removed["jobs"] = _remove(database, JOBS, ended)
    if retention.audit_days is not None:
        old = AUDIT.c.created_at < before(retention.audit_days)
        removed["audit_log"] = _remove(database, AUDIT, old)
    if retention.plans_days is not None:
        cutoff = before(retention.plans_days)
        removed["plans"] = _remove(database, PLANS, PLANS.c.created_at < cutoff)
        removed["profiles"] = _remove(
            database, PROFILES, and_(PROFILES.c.created_at < cutoff, ~_has_plan())
        )
        removed["graphs"] = _remove(database, GRAPHS, GRAPHS.c.created_at < cutoff)
        removed["reusable_results"] = _remove(database, REUSE, REUSE.c.created_at < cutoff)
    return removed


def _has_plan() -> ColumnElement[bool]:
    return exists().where(
        PLANS.c.project_id == PROFILES.c.project_id, PLANS.c.profile_id == PROFILES.c.id
    )


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
        rows = connection.execute(some).all()
        num_removed = 0
        for row in rows:
            this = and_(*(column == value for column, value in zip(key, row, strict=True)))
            if table is JOBS:
                mine = select(JOBS.c.id).where(this).scalar_subquery()
                connection.execute(delete(JOB_EVENTS).where(JOB_EVENTS.c.job_id == mine))
            # The condition again, now under the lock: a plan stored since the select keeps
            # its profile.
            num_removed += connection.execute(delete(table).where(this, doomed)).rowcount
    return num_removed
