"""Migration of a database to this release's tables, in one transaction and by one process.

The transaction takes a lock before it reads the revision: SQLite's write lock, or an advisory
lock of PostgreSQL. Of servers that start together, one migrates and the others then find nothing
to do. Both databases roll back changes of tables, so a killed migration leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, MetaData, inspect, text

from ...core.errors import InvalidInput
from .database import NAMING, Database
from .errors import StoreUnavailable
from .tables import PROJECTS, REVISION

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"

LOCK = 0x57_41_47_45  # "WAGE"
"""Number of the advisory lock in PostgreSQL."""

UPGRADE_TIMEOUT_MS = 120_000
"""Longest wait for another server's migration of an SQLite file."""

BEFORE_MIGRATIONS = 1
"""``PRAGMA user_version`` of SQLite files older than the migrations, at revision 0001."""

SQLITE_VERSION = 2
"""``PRAGMA user_version`` since then, which makes older releases reject the file."""


def upgrade(database: Database, to: str = REVISION) -> tuple[str | None, str]:
    """Migrate to a revision; return the one found (`None` if empty) and the one reached.

    Raises:
        InvalidInput: A newer release wrote the database, it holds foreign tables, or it is no
            database.
        StoreUnavailable: It does not answer, or another server's migration takes too long.
    """
    try:
        with database.read() as connection:
            found = revision(connection)
        if found == to:
            return found, to
        with _locked(database) as connection:
            # Again, under the lock: another server may have migrated since.
            found = revision(connection)
            if found is not None and found > to:
                raise InvalidInput(
                    f"database {database.name} is at revision {found}, beyond {to}; use an empty "
                    "database"
                )
            if found != to:
                _migrate(connection, found, to)
    except StoreUnavailable as error:
        if database.is_postgresql or database.url.database is None:
            raise
        raise InvalidInput(f"cannot use {error}") from None
    return found, to


def check_revision(database: Database) -> None:
    """Check that the database has this release's tables. Raises: InvalidInput, if it has not."""
    with database.read() as connection:
        found = revision(connection)
    if found != REVISION:
        raise InvalidInput(
            f"database {database.name} is {'empty' if found is None else 'at revision ' + found}, "
            f"this release needs {REVISION}; run 'stagewright db upgrade'"
        )


def revision(connection: Connection) -> str | None:
    """Return the revision of a database; `None` if it is empty. Raises: InvalidInput."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables:
        found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
        if found is None or str(found) > REVISION:
            raise InvalidInput(_newer(f"revision {found}"))
        return str(found)
    if connection.dialect.name == "sqlite":
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if version == BEFORE_MIGRATIONS:
            return "0001"
        if version != 0:
            raise InvalidInput(_newer(f"version {version}"))
    if tables:
        others = ", ".join(sorted(tables)[:5])
        raise InvalidInput(
            f"the database holds tables of something else ({others}); use another database"
        )
    return None


def _newer(found: str) -> str:
    return (
        f"the database has {found}, written by a newer release; this one knows revisions up to "
        f"{REVISION}. Use the newer release, or another database"
    )


def _migrate(connection: Connection, found: str | None, to: str) -> None:
    """Run the migrations between two revisions in the caller's transaction."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(MIGRATIONS))
    names = MetaData(naming_convention=NAMING)
    context = MigrationContext.configure(connection, opts={"target_metadata": names})
    with Operations.context(context):
        for script in reversed(list(scripts.iterate_revisions(to, found or "base"))):
            script.module.upgrade()
    context.stamp(scripts, to)


@contextmanager
def _locked(database: Database) -> Iterator[Connection]:
    """Yield a transaction in which no other process migrates and SQLite can rebuild tables."""
    if database.is_postgresql:
        with database.write() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            yield connection
        return
    # SQLite changes a column by copying the table, during which foreign keys cannot hold; they
    # are checked at the end instead.
    with database.unchecked_write(UPGRADE_TIMEOUT_MS) as connection:
        yield connection
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        assert broken is None, f"the migration left a row without its parent: {broken}"
        if PROJECTS.name in inspect(connection).get_table_names():
            connection.exec_driver_sql(f"PRAGMA user_version = {SQLITE_VERSION}")
