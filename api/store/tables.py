"""Table definitions of this release, which `migrate` creates."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.sql.schema import SchemaItem

from .database import NAMING, Instant, Words, position

REVISION = "0.1.0"
"""Revision of these tables; a database of another one is refused."""

METADATA = MetaData(naming_convention=NAMING)


def _texts(*names: str, nullable: bool = False) -> list[Column[str]]:
    return [Column(name, Words, nullable=nullable) for name in names]


def _instants(*names: str, nullable: bool = True) -> list[Column[object]]:
    return [Column(name, Instant, nullable=nullable) for name in names]


def _project(*, primary_key: bool = False) -> Column[str]:
    owner = ForeignKey("projects.id")
    return Column("project_id", Words, owner, nullable=False, primary_key=primary_key)


def _created_at() -> Column[object]:
    return Column("created_at", Instant, nullable=False)


def _list(name: str, *columns: SchemaItem) -> Table:
    """Return a table whose rows are listed in the order of their insertion."""
    return Table(name, METADATA, position(), _created_at(), *columns, sqlite_autoincrement=True)


def _documents(name: str, *columns: SchemaItem) -> Table:
    """Return a table of documents, in which each id exists once per project."""
    return _list(
        name,
        _project(),
        *_texts("id"),
        *columns,
        Column("document", Text, nullable=False),
        UniqueConstraint("project_id", "id"),
        Index(None, "project_id", "position"),
    )


PROJECTS = _list(
    "projects",
    Column("id", Words, nullable=False, unique=True),
    Column("name", Words, nullable=False, unique=True),
    Column("stored_size", BigInteger, nullable=False, server_default="0"),
)

API_KEYS = _list(
    "api_keys",
    _project(),
    Column("id", Words, nullable=False, unique=True),
    Column("secret_digest", Words, nullable=False, unique=True),
    *_texts("name", "scopes", "quotas"),
    *_instants("expires_at", "revoked_at", "last_used_at"),
    Index(None, "project_id"),
)

PROFILES = _documents(
    "profiles",
    *_texts("model"),
    Column("num_layers", Integer, nullable=False),
    Column("estimated", Boolean, nullable=False),
    *_texts("family", nullable=True),
    Column("num_parameters", BigInteger),
)

GRAPHS = _documents("graphs", *_texts("model"), Column("num_layers", Integer, nullable=False))

PLANS = _documents(
    "plans",
    *_texts("profile_id", "status"),
    *_texts("model", "devices", "schedule", "name", "tags", "notes", nullable=True),
    Column("num_stages", Integer),
    Column("step_time_s", Float),
    ForeignKeyConstraint(["project_id", "profile_id"], ["profiles.project_id", "profiles.id"]),
    Index(None, "project_id", "profile_id"),
)

JOBS = _list(
    "jobs",
    _project(),
    Column("id", Words, nullable=False, unique=True),
    *_texts("kind", "state", "request_json"),
    *_texts("request_digest", "submit_key", "key_id", "needs", "worker", nullable=True),
    *_texts("result_id", "outcome_json", nullable=True),
    *_instants("deadline_at", "started_at", "heartbeat_at", "finished_at"),
    Column("attempt", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("num_events", Integer, nullable=False),
    UniqueConstraint("project_id", "submit_key"),
    Index(None, "state", "position"),
    Index(None, "project_id", "position"),
    Index(None, "project_id", "request_digest"),
)

JOB_EVENTS = Table(
    "job_events",
    METADATA,
    Column("job_id", Words, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    _created_at(),
    Column("attempt", Integer, nullable=False),
    *_texts("kind", "data_json"),
)

ANSWERS = Table(
    "idempotent_answers",
    METADATA,
    _project(primary_key=True),
    Column("key", Words, primary_key=True),
    *_texts("request_digest"),
    *_texts("holder", "answer", nullable=True),
    _created_at(),
    *_instants("leased_until", nullable=False),
    Column("expires_at", Instant, nullable=False, index=True),
)

REUSE = Table(
    "reusable_results",
    METADATA,
    _project(primary_key=True),
    Column("kind", Words, primary_key=True),
    Column("request_digest", Words, primary_key=True),
    _created_at(),
    *_texts("result_id"),
)

AUDIT = _list(
    "audit_log",
    *_texts("action", "outcome", "details_json"),
    *_texts("project_id", "key_id", "object_id", "request_id", "address", nullable=True),
    Index(None, "project_id", "position"),
)
