"""The store on SQLite or PostgreSQL, through SQLAlchemy Core.

Core and not its object mapper: rows become frozen records at once, so there is no session whose
state threads could share, and a change with its condition is one visible statement.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from .audit import SqlAudit
from .database import Database
from .documents import SqlDocuments
from .idempotency import SqlIdempotency, SqlReuse
from .jobs import SqlJobs
from .migrate import check_revision, upgrade
from .projects import SqlKeys, SqlProjects
from .records import Retention
from .retention import expire


def utc_now() -> datetime:
    return datetime.now(UTC)


class SqlStore:
    """`contract.Store` on a database, which is brought to this release's tables first.

    Args:
        address: Path of an SQLite file, made if missing; `settings.IN_MEMORY`, for a database
            that lives as long as the store; or ``postgresql://user:password@host:port/name``.
        now: The clock.

    Raises:
        InvalidInput: There can be no database at that address, a newer release wrote it, or it
            holds something else.
        StoreUnavailable: It does not answer.
    """

    def __init__(self, address: str | Path, *, now: Callable[[], datetime] = utc_now) -> None:
        self._database = Database(str(address), now=now)
        try:
            upgrade(self._database)
        except BaseException:
            self.close()
            raise
        self.projects = SqlProjects(self._database)
        self.keys = SqlKeys(self._database)
        self.documents = SqlDocuments(self._database)
        self.jobs = SqlJobs(self._database, self.documents)
        self.idempotency = SqlIdempotency(self._database)
        self.reuse = SqlReuse(self._database)
        self.audit = SqlAudit(self._database)

    def expire(self, retention: Retention) -> dict[str, int]:
        return expire(self._database, retention)

    def check(self) -> None:
        check_revision(self._database)

    def close(self) -> None:
        self._database.close()
