"""The store on SQLite, through SQLAlchemy Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    create_engine,
    event,
    select,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import QueuePool

from ..core.errors import InvalidInput
from ..core.profile import Profile
from .records import PlanRecord, PlanSummary, Stored, StoredPlan, StoredProfile
from .settings import IN_MEMORY
from .store import NotFound, Store

SCHEMA_VERSION = 1
"""Written to the file (``PRAGMA user_version``); another version is refused, not guessed at."""

BUSY_TIMEOUT_MS = 10_000
"""How long a write waits for another process's write."""

METADATA = MetaData()

PROFILES = Table(
    "profiles",
    METADATA,
    Column("position", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("created_at", String, nullable=False),
    Column("document", Text, nullable=False),
)

PLANS = Table(
    "plans",
    METADATA,
    Column("position", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("created_at", String, nullable=False),
    Column("profile_id", ForeignKey(PROFILES.c.id), nullable=False),
    Column("status", String, nullable=False),
    Column("model", String),
    Column("num_stages", Integer),
    Column("step_time_s", Float),
    Column("document", Text, nullable=False),
)

SUMMARY_COLUMNS = [PLANS.c[name] for name in PlanSummary.model_fields]


class SQLiteStore(Store):
    """One SQLite file, or a database in memory.

    Args:
        database: Path of the file, made if missing, or `IN_MEMORY`.
        now: The clock.

    Raises:
        InvalidInput: The file cannot be opened, is no database, or another release wrote it.
    """

    def __init__(
        self, database: str | Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._now = now
        self._engine = _engine(str(database))
        try:
            self._prepare()
        except DatabaseError as error:
            self.close()
            raise InvalidInput(f"cannot use database {database}: {error.orig}") from None
        except InvalidInput:
            self.close()
            raise

    def _prepare(self) -> None:
        with self._write() as connection:
            found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if found not in (0, SCHEMA_VERSION):
                raise InvalidInput(
                    f"the database has version {found}, but this release reads version "
                    f"{SCHEMA_VERSION}; use the release that wrote it, or another file"
                )
            METADATA.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """A transaction that holds the write lock from its start."""
        with self._engine.connect().execution_options(write=True) as connection, connection.begin():
            yield connection

    def put_profile(self, profile: Profile) -> Stored:
        values = {"id": profile.content_id(), "document": profile.to_json()}
        with self._write() as connection:
            row = self._put(connection, PROFILES, values)
        return Stored(id=row.id, created_at=row.created_at)

    def profile(self, profile_id: str) -> StoredProfile:
        row = self._row(PROFILES, "profile", profile_id)
        profile = Profile.model_validate_json(row.document)
        return StoredProfile(id=row.id, created_at=row.created_at, profile=profile)

    def put_plan(self, record: PlanRecord) -> StoredPlan:
        plan = record.plan
        values = {
            "id": record.record_id(),
            "profile_id": record.profile_id,
            "status": record.status,
            "model": plan.model if plan else None,
            "num_stages": plan.num_stages if plan else None,
            "step_time_s": plan.step_time_s if plan else None,
            "document": record.model_dump_json(),
        }
        with self._write() as connection:
            known = select(PROFILES.c.id).where(PROFILES.c.id == record.profile_id)
            if connection.execute(known).first() is None:
                raise NotFound("profile", record.profile_id)
            row = self._put(connection, PLANS, values)
        return _stored_plan(row)

    def plan(self, plan_id: str) -> StoredPlan:
        return _stored_plan(self._row(PLANS, "plan", plan_id))

    def plans(self, *, limit: int) -> list[PlanSummary]:
        newest = select(*SUMMARY_COLUMNS).order_by(PLANS.c.position.desc()).limit(limit)
        with self._engine.connect() as connection:
            rows = connection.execute(newest).all()
        return [PlanSummary.model_validate(dict(row._mapping)) for row in rows]

    def check(self) -> None:
        with self._engine.connect() as connection:
            connection.execute(select(PLANS.c.position).limit(1)).all()

    def close(self) -> None:
        self._engine.dispose()

    def _put(self, connection: Connection, table: Table, values: dict[str, Any]) -> Row[Any]:
        """Insert unless the id is there; either way, the row now stored."""
        created_at = self._now().astimezone(UTC).isoformat()
        statement = insert(table).values(created_at=created_at, **values)
        connection.execute(statement.on_conflict_do_nothing(index_elements=["id"]))
        return connection.execute(select(table).where(table.c.id == values["id"])).one()

    def _row(self, table: Table, kind: str, identifier: str) -> Row[Any]:
        with self._engine.connect() as connection:
            row = connection.execute(select(table).where(table.c.id == identifier)).first()
        if row is None:
            raise NotFound(kind, identifier)
        return row


def _stored_plan(row: Row[Any]) -> StoredPlan:
    record = PlanRecord.model_validate_json(row.document)
    return StoredPlan(id=row.id, created_at=row.created_at, **dict(record))


def _engine(database: str) -> Engine:
    """An engine whose transactions begin when SQLAlchemy says so, not when sqlite3 guesses."""
    in_memory = database == IN_MEMORY
    engine = create_engine(
        "sqlite://" if in_memory else f"sqlite:///{database}",
        poolclass=QueuePool,
        # A database in memory belongs to its one connection, which threads take in turns.
        pool_size=1 if in_memory else 5,
        max_overflow=0 if in_memory else 10,
        connect_args={"check_same_thread": False},
    )

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
