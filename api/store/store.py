"""The store on SQLite or PostgreSQL, through SQLAlchemy Core.

Core, not the object mapper: rows become frozen records at once, so there is no session whose
state threads could share, and a conditional change is one visible statement.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from sqlalchemy import text

from .database import Database, utc_now
from .documents import DocumentStore
from .idempotency import IdempotencyStore, ReuseStore
from .jobs import JobStore
from .maintenance import expire
from .migrate import VERSION_TABLE, check_revision, upgrade
from .projects import AuditLog, KeyStore, ProjectStore
from .records import Retention


class Store:
    """All persistent data of a service; opening it creates the tables of an empty database.

    These guarantees hold for every method of every part:

    - A write has happened when the method returns and is visible to every later read, by other
      threads and processes too. It happens entirely or not at all, whichever process is killed.
    - Reading returns what was written, except that a NUL in a name becomes U+FFFD.
    - Methods may be called from several threads and processes at once. They may block, so none
      may be called on an event loop.
    - An id of another project is not found, exactly like an id that never existed.
    - `StoreUnavailable` means that the database did not answer and nothing was written.

    Args:
        address: Path of an SQLite file, created if missing; `database.IN_MEMORY`, for a database
            that lives as long as the store; or ``postgresql://user:password@host:port/name``.
        now: The clock.
        max_project_bytes: Largest size of one project's documents and of the answers kept for its
                idempotency keys.

    Raises:
        InvalidInput: The address is invalid, or the database was written by another release or
            holds something else.
        StoreUnavailable: The database does not answer.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        now: Callable[[], datetime] = utc_now,
        max_project_bytes: int | None = None,
    ) -> None:
        self._database = Database(str(address), now=now)
        try:
            upgrade(self._database)
        except BaseException:
            self.close()
            raise
        self.projects = ProjectStore(self._database)
        self.keys = KeyStore(self._database)
        self.idempotency = IdempotencyStore(self._database, max_project_bytes)
        self.reuse = ReuseStore(self._database)
        self.documents = DocumentStore(self._database, self.reuse, max_project_bytes)
        self.jobs = JobStore(self._database, self.documents)
        self.audit = AuditLog(self._database)

    def expire(self, retention: Retention) -> dict[str, int]:
        """Remove expired answers and whatever retention allows; return counts by table.

        Works in small transactions, between which others read and write. Unfinished jobs stay.
        """
        return expire(self._database, retention)

    def check(self) -> None:
        """Raise an exception unless the database has this release's tables and takes a write."""
        check_revision(self._database)
        with self._database.write() as connection:  # a full disk refuses no less than a row
            connection.execute(text(f"UPDATE {VERSION_TABLE} SET revision = revision"))

    def close(self) -> None:
        """Release files and connections; closing twice is allowed, any other call is not."""
        self._database.close()
