"""Creation of this release's tables, in one transaction and by one process.

The transaction takes a lock before it reads the revision: SQLite's write lock, or an advisory
lock of PostgreSQL. Of servers that start together, one creates the tables and the others then
find nothing to do. Both databases roll back new tables, so a killed server leaves no trace.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text

from ...core.errors import InvalidInput
from .database import Database
from .errors import StoreUnavailable
from .records import DEFAULT_PROJECT
from .tables import METADATA, PROJECTS, REVISION

VERSION_TABLE = "schema_revision"

LOCK = 0x57_41_47_45  # "WAGE"
"""Number of the advisory lock in PostgreSQL."""


def upgrade(database: Database) -> str | None:
    """Create the tables of an empty database; return the revision found (`None` if empty).

    Raises:
        InvalidInput: Another release wrote the database, it holds foreign tables, or it is no
            database.
        StoreUnavailable: It does not answer, or other servers' writes take too long.
    """
    try:
        with database.read() as connection:
            found = revision(connection)
        if found is None:
            with database.write() as connection:
                if database.is_postgresql:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
                # Again, under the lock: another server may have created them since.
                if revision(connection) is None:
                    _create_tables(database, connection)
    except StoreUnavailable as error:
        if database.is_postgresql or database.url.database is None:
            raise
        raise InvalidInput(f"cannot use {error}") from None
    return found


def check_revision(database: Database) -> None:
    """Check that the database has this release's tables. Raises: InvalidInput, if it has not."""
    with database.read() as connection:
        if revision(connection) is None:
            raise InvalidInput(
                f"database {database.name} is empty; create its tables with 'stagewright db "
                "upgrade', or by starting the server"
            )


def revision(connection: Connection) -> str | None:
    """Return this release's revision; `None` if the database is empty. Raises: InvalidInput."""
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE in tables:
        found = connection.execute(text(f"SELECT revision FROM {VERSION_TABLE}")).scalar()
        if found != REVISION:
            raise InvalidInput(
                f"the database has revision {found}, and this release reads {REVISION} only; use "
                "the release that wrote it, or an empty database"
            )
        return REVISION
    if tables:
        raise InvalidInput(
            f"the database holds tables of something else ({', '.join(sorted(tables)[:5])}), "
            "such as another program or Stagewright before 0.1.0; use an empty database"
        )
    return None


def _create_tables(database: Database, connection: Connection) -> None:
    METADATA.create_all(connection)
    default = {"id": DEFAULT_PROJECT, "name": "default", "created_at": database.now()}
    connection.execute(PROJECTS.insert().values(**default))
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} (revision TEXT NOT NULL)"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES (:found)"), {"found": REVISION})
