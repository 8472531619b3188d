"""Bringing a database to this release's tables: all of it or nothing, and one at a time.

Every migration runs in one transaction that holds a lock from before the revision is read:
SQLite's write lock, or an advisory lock of PostgreSQL. Of servers that start together one
migrates, and the others then find nothing to do. Both databases undo changes of tables with
the rest of a transaction, so what is killed half-way leaves what was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, MetaData, inspect, text

from ...core.errors import InvalidInput
from .column_types import NAMING
from .database import Database
from .errors import StoreUnavailable
from .tables import PROJECTS, REVISION

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "alembic_version"

LOCK = 0x57_41_47_45  # "WAGE"
"""Of PostgreSQL, for everyone who migrates a database of ours."""

UPGRADE_TIMEOUT_MS = 120_000
"""How long a server waits for another's migration of an SQLite file."""

BEFORE_MIGRATIONS = 1
"""``PRAGMA user_version`` of SQLite files made before there were migrations: revision 0001."""

SQLITE_VERSION = 2
"""Written there since, so that releases from before refuse the file instead of misreading it."""


def upgrade(database: Database, to: str = REVISION) -> tuple[str | None, str]:
    """Migrate to a revision; the one found, `None` for an empty database, and the one now there.

    Raises:
        InvalidInput: A newer release wrote the database, it holds something else's tables, or it
            is no database at all.
        StoreUnavailable: It does not answer, or another migration of it takes too long.
    """
    try:
        with database.read() as connection:
            found = revision(connection)
        if found == to:
            return found, to
        with _locked(database) as connection:
            found = revision(connection)
            if found is not None and found > to:
                raise InvalidInput(
                    f"database {database.name} is at revision {found}, beyond {to}; take an "
                    "empty one"
                )
            if found != to:
                _migrate(connection, found, to)
    except StoreUnavailable as error:
        if database.is_postgresql or database.url.database is None:
            raise
        raise InvalidInput(f"cannot use {error}") from None
    return found, to


def check_revision(database: Database) -> None:
    """Return if the database has this release's tables.

    Raises:
        InvalidInput: It has not; the message says what to do.
        StoreUnavailable: It does not answer.
    """
    with database.read() as connection:
        found = revision(connection)
    if found != REVISION:
        raise InvalidInput(
            f"database {database.name} is {'empty' if found is None else 'at revision ' + found}, "
            f"this release needs {REVISION}; run 'stagewright db upgrade'"
        )


def revision(connection: Connection) -> str | None:
    """The revision of a database; `None` if it is empty.

    Raises:
        InvalidInput: It is none that this release knows.
    """
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
            f"the database holds tables that are not Stagewright's ({others}); give it another"
        )
    return None


def known_revisions() -> tuple[str, ...]:
    """Every revision this release can make, oldest first."""
    found = _scripts().walk_revisions()
    return tuple(script.revision for script in found)[::-1]


def _newer(found: str) -> str:
    return (
        f"the database has {found}, but this release knows none beyond {REVISION}: a newer "
        "release wrote it; use that one, or another database"
    )


def _scripts() -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(MIGRATIONS))


def _migrate(connection: Connection, found: str | None, to: str) -> None:
    """Run the migrations between two revisions in the caller's transaction."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    scripts = _scripts()
    names = MetaData(naming_convention=NAMING)
    context = MigrationContext.configure(connection, opts={"target_metadata": names})
    with Operations.context(context):
        for script in reversed(list(scripts.iterate_revisions(to, found or "base"))):
            script.module.upgrade()
    context.stamp(scripts, to)


@contextmanager
def _locked(database: Database) -> Iterator[Connection]:
    """A transaction in which nobody else migrates, and SQLite lets tables be made anew."""
    if database.is_postgresql:
        with database.write() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            yield connection
        return
    with database.unchecked_write(UPGRADE_TIMEOUT_MS) as connection:
        yield connection
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        assert broken is None, f"the migration left a row without its parent: {broken}"
        if PROJECTS.name in inspect(connection).get_table_names():
            connection.exec_driver_sql(f"PRAGMA user_version = {SQLITE_VERSION}")
