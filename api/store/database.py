"""One database, SQLite or PostgreSQL: its address, its connections, its transactions."""

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
from .group_commit import Waited, WritesTogether

IN_MEMORY = ":memory:"
"""The address of a database that lives as long as its server."""

BUSY_TIMEOUT_MS = 10_000
"""How long a write to SQLite waits for another process's write."""

TURN_TIMEOUT_S = 30
"""How long one waits for the writes of this process's other threads."""

CONNECT_TIMEOUT_S = 10
"""How long a PostgreSQL server may take to answer at first."""

GIVEN_UP = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""A server or network that falls silent is given up after about 25 s, not after hours."""

POOL_SIZE = 20
MAX_OVERFLOW = 10
"""Connections kept, of which the server's threads need no more, and lent beyond that; opening one
takes longer than what it is opened for. A thread waits for one while all are in use."""

POSTGRESQL = "postgresql"


class Database:
    """Connections to one database.

    Args:
        address: Path of an SQLite file, `IN_MEMORY`, or a URL ``postgresql://user@host/name``.
        now: The clock.

    Raises:
        InvalidInput: The address is of another kind of database, or makes no sense.
    """

    def __init__(self, address: str, *, now: Callable[[], datetime]) -> None:
        self.url = database_url(address)
        self.engine = _engine(self.url)
        self._now = now
        # Of SQLite only one connection writes. Left to SQLite the others sleep and try again,
        # and some sleep for seconds; threads that queue here are woken in turn.
        self.together = WritesTogether(self._begun, TURN_TIMEOUT_S)
        self._write = self.engine.begin if self.is_postgresql else self.together.write

    @property
    def name(self) -> str:
        """For messages: without the password."""
        if self.is_postgresql:
            return self.url.set(drivername=POSTGRESQL).render_as_string(hide_password=True)
        return self.url.database or IN_MEMORY

    @property
    def is_postgresql(self) -> bool:
        return self.engine.dialect.name == POSTGRESQL

    def now(self) -> datetime:
        return self._now().astimezone(UTC)

    def insert(self, table: Table) -> Any:
        """An insert that can say what to do on a conflict."""
        return (postgresql.insert if self.is_postgresql else sqlite.insert)(table)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read with."""
        with self._unavailable(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection whose reads all see one moment, whoever writes meanwhile."""
        options = {"isolation_level": "REPEATABLE READ"} if self.is_postgresql else {}
        with (
            self._unavailable(),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction, committed at the end of the block; in SQLite the only one that writes."""
        with self._unavailable(), self._write() as connection:
            yield connection

    def _begun(self) -> Connection:
        """A connection of SQLite in a transaction that may write."""
        connection = self.engine.connect().execution_options(write=True)
        try:
            connection.begin()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def unchecked_write(self, timeout_ms: int) -> Iterator[Connection]:
        """As `write`, of SQLite, with its own patience and without a look at foreign keys."""
        with self._unavailable(), self.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None, "a connection in use has its driver's"
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
        except Waited as error:
            raise StoreUnavailable(f"database {self.name}: {error}") from None
        except DatabaseError as error:
            if type(error) is DatabaseError:  # a damaged file; subclasses are our mistakes
                raise StoreUnavailable(f"database {self.name}: {_reason(error)}") from error
            raise


def database_url(address: str) -> URL:
    """The address as SQLAlchemy has it."""
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
    """A random id such as ``job_5f0c...``: nobody guesses another's."""
    return f"{kind}_{secrets.token_hex(12)}"


def _reason(error: Exception) -> str:
    """What the driver said, on one line."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == POSTGRESQL:
        return create_engine(
            url,
            pool_size=POOL_SIZE,
            max_overflow=MAX_OVERFLOW,
            pool_pre_ping=True,  # a restarted database costs one question, not an error
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "client_encoding": "utf8",
                **GIVEN_UP,
            },
        )
    return _sqlite_engine(url)


def _sqlite_engine(url: URL) -> Engine:
    """An engine whose transactions begin when SQLAlchemy says so, not when sqlite3 guesses."""
    in_memory = url.database is None
    engine = create_engine(
        url,
        poolclass=QueuePool,
        # A database in memory belongs to its one connection, which threads take in turns.
        pool_size=1 if in_memory else POOL_SIZE,
        max_overflow=0 if in_memory else MAX_OVERFLOW,
        connect_args={"check_same_thread": False},
    )

    @event.listens_for(engine, "do_connect")
    def _make_private(*_: object) -> None:
        """It holds names of models and hashes of keys: a new file is for its owner alone."""
        if url.database is not None and not url.query:
            with suppress(OSError):  # SQLite says it better
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
        immediate = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
