"""An SQLite or PostgreSQL database: connections, transactions, pages of rows and column types."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Integer,
    Row,
    Select,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.pool import QueuePool

from ...core.errors import InvalidInput
from .errors import StoreUnavailable
from .records import Page

Item = TypeVar("Item")

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

MAX_CURSOR_CHARACTERS = 100
MAX_POSITION = 2**63 - 1


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """Connections to one database.

    Its address is a path of an SQLite file, `IN_MEMORY`, or ``postgresql://user@host/name``; `now`
    is the clock. Raises: InvalidInput.
    """

    def __init__(self, address: str, *, now: Callable[[], datetime]) -> None:
        self.url = database_url(address)
        self.engine = _engine(self.url)
        self._now = now
        # In SQLite only one connection can write. Left to SQLite, the others poll with growing
        # pauses and some starve for seconds; threads that queue here are woken in turn.
        self._turn = threading.Lock()
        self._write = self.engine.begin if self.is_postgresql else self._write_in_turn

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

    def fetch_page(
        self,
        statement: Select[Any],
        table: Table,
        to_item: Callable[[Row[Any]], Item],
        *,
        limit: int,
        cursor: str | None,
    ) -> Page[Item]:
        """Return a page, newest first, of a statement that selects ``table.c.position``.

        Keyset pagination: a cursor holds the position of the last row seen. Rows added later have
        greater positions and so belong to no later page; removed rows leave no gap.

        Raises:
            InvalidInput: The cursor is not one of this table's lists.
        """
        if cursor is not None:
            statement = statement.where(table.c.position < _position(table, cursor))
        newest = statement.order_by(table.c.position.desc()).limit(limit + 1)
        with self.read() as connection:
            rows = connection.execute(newest).all()
        more = len(rows) > limit  # one row beyond the page was asked for
        return Page(
            items=tuple(map(to_item, rows[:limit])),
            next_cursor=_cursor(table, rows[limit - 1].position) if more else None,
        )

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

    @contextmanager
    def _write_in_turn(self) -> Iterator[Connection]:
        if not self._turn.acquire(timeout=TURN_TIMEOUT_S):
            raise StoreUnavailable(f"database {self.name}: other writes take too long")
        try:
            with self.engine.connect() as plain:
                connection = plain.execution_options(write=True)
                with connection.begin():
                    yield connection
        finally:
            self._turn.release()

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError, NoConnectionFree) as error:
            raise StoreUnavailable(f"database {self.name}: {_reason(error)}") from error
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
    """Return a random id such as ``job_5f0c...``, with 128 bits that cannot be guessed."""
    return f"{kind}_{secrets.token_hex(16)}"


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
        # No file that exists: closing it releases SQLite's locks, which belong to the process, and
        # another process that closes the database then removes its log.
        if url.database is not None and not url.query:
            with suppress(OSError):  # SQLite reports it better
                os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: object) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        if not in_memory:
            _use_write_ahead_log(connection)
            # A commit does not wait for the disk: only a power cut can undo the last ones.
            connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at once. A deferred transaction that has read and then
        # writes fails without waiting if another wrote meanwhile.
        immediate = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _use_write_ahead_log(connection: Any) -> None:
    """Switch a file to SQLite's write-ahead log, waiting for other processes that do the same."""
    # SQLite does not apply its busy timeout to this statement: beside another connection to a new
    # file it fails at once.
    until_s = time.monotonic() + BUSY_TIMEOUT_MS / 1e3
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
        time.sleep(0.01)


def _cursor(table: Table, position: int) -> str:
    return base64.urlsafe_b64encode(f"{table.name}:{position}".encode()).decode().rstrip("=")


def _position(table: Table, cursor: str) -> int:
    name, _, position = _decode(cursor).partition(":")
    if name != table.name or not position.isdecimal() or int(position) > MAX_POSITION:
        raise InvalidInput(
            f"invalid cursor {cursor[:MAX_CURSOR_CHARACTERS]!r} for this list; use the "
            "next_cursor of an earlier page, or start without a cursor",
            field="/cursor",
        )
    return int(position)


def _decode(cursor: str) -> str:
    """Return a cursor's text; empty if it cannot be decoded."""
    if len(cursor) > MAX_CURSOR_CHARACTERS:
        return ""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded.encode(), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return ""


NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
"""Names of the constraints and indexes of all tables."""


class Instant(TypeDecorator[datetime]):
    """A time with a zone, stored as UTC: SQLite has no zones and compares times as text."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Words(TypeDecorator[str]):
    """Text from clients; what PostgreSQL cannot store (NUL, lone surrogates) is replaced.

    Parameters of queries are replaced too, so an id containing a NUL is simply not found.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def position() -> Column[int]:
    """Return a column for the order of insertion; never reused, or a cursor could skip a row."""
    return Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
