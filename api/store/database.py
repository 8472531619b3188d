"""Connections and transactions of an SQLite or PostgreSQL database."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.pool import QueuePool

from ...core.errors import InvalidInput
from .errors import StoreUnavailable
from .group_commit import GroupCommit, NotCommitted

IN_MEMORY = ":memory:"
"""The address of a database that lives as long as its server."""

BUSY_TIMEOUT_MS = 10_000
"""Longest wait of a write to SQLite for another process's write."""

TURN_TIMEOUT_S = 30
"""Longest wait for the writes of this process's other threads."""

CONNECT_TIMEOUT_S = 10
"""Longest wait for a connection to PostgreSQL."""

KEEPALIVES = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Detect a dead PostgreSQL server or network after about 25 s; the default takes hours."""

POOL_SIZE = 20
MAX_OVERFLOW = 10
"""Connections kept open, enough for the server's threads, and opened beyond that under load.
Opening one takes longer than most queries; a thread waits while all are in use."""

POSTGRESQL = "postgresql"


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """Connections to one database.

    Args:
        address: Path of an SQLite file, `IN_MEMORY`, or a URL ``postgresql://user@host/name``.
        now: The clock.

    Raises:
        InvalidInput: The address is invalid or names another kind of database.
    """

    def __init__(self, address: str, *, now: Callable[[], datetime]) -> None:
        self.url = database_url(address)
        self.engine = _engine(self.url)
        self._now = now
        # In SQLite only one connection can write. Left to SQLite, the others poll with growing
        # pauses and some starve for seconds; threads that queue here are woken in turn.
        self.group_commit = GroupCommit(self._begin_write, TURN_TIMEOUT_S)
        self._write = self.engine.begin if self.is_postgresql else self.group_commit.write

    @property
    def name(self) -> str:
        """Return the address for messages, without the password."""
        if self.is_postgresql:
            return self.url.set(drivername=POSTGRESQL).render_as_string(hide_password=True)
        return self.url.database or IN_MEMORY

    @property
    def is_postgresql(self) -> bool:
        return self.engine.dialect.name == POSTGRESQL

    def now(self) -> datetime:
        return self._now().astimezone(UTC)

    def insert(self, table: Table) -> Any:
        """Return an insert with ``on_conflict`` clauses, in the dialect of this database."""
        return (postgresql.insert if self.is_postgresql else sqlite.insert)(table)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection for reading."""
        with self._unavailable(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Yield a connection whose reads all see the database at one moment."""
        options = {"isolation_level": "REPEATABLE READ"} if self.is_postgresql else {}
        with (
            self._unavailable(),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield a connection in a transaction, committed at the end of the block."""
        with self._unavailable(), self._write() as connection:
            yield connection

    def _begin_write(self) -> Connection:
        """Return an SQLite connection in a transaction that may write."""
        connection = self.engine.connect().execution_options(write=True)
        try:
            connection.begin()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def unchecked_write(self, timeout_ms: int) -> Iterator[Connection]:
        """Yield an SQLite write transaction with its own timeout and without foreign key checks."""
        with self._unavailable(), self.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None, "an open connection has a driver connection"
            # Both pragmas are ignored inside a transaction, so they are set before it begins.
            driver.execute(f"PRAGMA busy_timeout = {timeout_ms}")
            driver.execute("PRAGMA foreign_keys = OFF")
            try:
                with connection.execution_options(write=True).begin():
                    yield connection
            finally:
                driver.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
                driver.execute("PRAGMA foreign_keys = ON")

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError, NoConnectionFree) as error:
            raise StoreUnavailable(f"database {self.name}: {_reason(error)}") from error
        except NotCommitted as error:
            raise StoreUnavailable(f"database {self.name}: {error}") from None
        except DatabaseError as error:
            if type(error) is DatabaseError:  # a damaged file; subclasses are our bugs
                raise StoreUnavailable(f"database {self.name}: {_reason(error)}") from error
            raise


def database_url(address: str) -> URL:
    """Return the address as a SQLAlchemy URL. Raises: InvalidInput."""
    if address == IN_MEMORY:
        return URL.create("sqlite")
    if "://" not in address and address:
        return URL.create("sqlite", database=address)
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        raise InvalidInput("the database's URL cannot be read; " + ACCEPTED) from None
    kind = url.get_backend_name()
    if kind in (POSTGRESQL, "postgres"):
        return url.set(drivername=f"{POSTGRESQL}+psycopg")
    if kind == "sqlite" and url.database:
        return url.set(drivername="sqlite")
    raise InvalidInput(f"a database of kind {kind!r} is not supported; " + ACCEPTED)


ACCEPTED = "give a file's path, or postgresql://user:password@host:port/name"


def new_id(kind: str) -> str:
    """Return a random id such as ``job_5f0c...``, with 96 bits that cannot be guessed."""
    return f"{kind}_{secrets.token_hex(12)}"


def _reason(error: Exception) -> str:
    """Return the driver's message on one line."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == POSTGRESQL:
        return create_engine(
            url,
            pool_size=POOL_SIZE,
            max_overflow=MAX_OVERFLOW,
            pool_pre_ping=True,  # after a restart of the database: one round trip, not an error
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "client_encoding": "utf8",
                **KEEPALIVES,
            },
        )
    return _sqlite_engine(url)


def _sqlite_engine(url: URL) -> Engine:
    """Return an engine whose transactions begin where SQLAlchemy begins them.

    By default the sqlite3 driver begins one before the first write only, so that a read before it
    would see another moment; hence its autocommit mode and an explicit BEGIN.
    """
    in_memory = url.database is None
    engine = create_engine(
        url,
        poolclass=QueuePool,
        # A database in memory exists in one connection, which the threads share in turn.
        pool_size=1 if in_memory else POOL_SIZE,
        max_overflow=0 if in_memory else MAX_OVERFLOW,
        connect_args={"check_same_thread": False},
    )

    @event.listens_for(engine, "do_connect")
    def _make_private(*_: object) -> None:
        """Create a new file readable by its owner only: it holds hashes of keys."""
        if url.database is not None and not url.query:
            with suppress(OSError):  # SQLite reports it better
                os.close(os.open(url.database, os.O_RDWR | os.O_CREAT, 0o600))

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        if not in_memory:
            connection.execute("PRAGMA journal_mode = WAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at once. A deferred transaction that has read and then
        # writes fails without waiting if another wrote meanwhile.
        immediate = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
