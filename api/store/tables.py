"""Table definitions of this release, which `migrations` create."""

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

from .column_types import NAMING, Instant, Words, position

REVISION = "0004"
"""The migration that creates these tables; a database must be at the same revision."""

METADATA = MetaData(naming_convention=NAMING)


def _project() -> Column[str]:
    return Column("project_id", Words, ForeignKey("projects.id"), nullable=False)


def _created_at() -> Column[object]:
    return Column("created_at", Instant, nullable=False)


def _documents(name: str, *columns: SchemaItem) -> Table:
    """Return a table of documents, in which each id exists once per project."""
    return Table(
        name,
        METADATA,
        position(),
        _project(),
        Column("id", Words, nullable=False),
        _created_at(),
        *columns,
        Column("document", Text, nullable=False),
        UniqueConstraint("project_id", "id"),
        Index(None, "project_id", "position"),
        sqlite_autoincrement=True,
    )


PROJECTS = Table(
    "projects",
    METADATA,
    position(),
    Column("id", Words, nullable=False, unique=True),
    _created_at(),
    Column("name", Words, nullable=False, unique=True),
    sqlite_autoincrement=True,
)

API_KEYS = Table(
    "api_keys",
    METADATA,
    position(),
    _project(),
    Column("id", Words, nullable=False, unique=True),
    _created_at(),
    Column("name", Words, nullable=False),
    Column("secret_digest", Words, nullable=False, unique=True),
    Column("scopes", Words, nullable=False),
    Column("quotas", Words, nullable=False),
    Column("expires_at", Instant),
    Column("revoked_at", Instant),
    Column("last_used_at", Instant),
    Index(None, "project_id"),
    sqlite_autoincrement=True,
)

PROFILES = _documents(
    "profiles",
    Column("model", Words, nullable=False),
    Column("num_layers", Integer, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("family", Words),
    Column("num_parameters", BigInteger),
)

GRAPHS = _documents(
    "graphs",
    Column("model", Words, nullable=False),
    Column("num_layers", Integer, nullable=False),
)

PLANS = _documents(
    "plans",
    Column("profile_id", Words, nullable=False),
    Column("status", Words, nullable=False),
    Column("model", Words),
    Column("num_stages", Integer),
    Column("step_time_s", Float),
    Column("devices", Words),
    Column("schedule", Words),
    ForeignKeyConstraint(["project_id", "profile_id"], ["profiles.project_id", "profiles.id"]),
    Index(None, "project_id", "profile_id"),
)

JOBS = Table(
    "jobs",
    METADATA,
    position(),
    _project(),
    Column("id", Words, nullable=False, unique=True),
    _created_at(),
    Column("kind", Words, nullable=False),
    Column("state", Words, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("request_json", Words, nullable=False),
    Column("request_digest", Words),
    Column("submit_key", Words),
    Column("key_id", Words),
    Column("needs", Words),
    Column("deadline_at", Instant),
    Column("worker", Words),
    Column("started_at", Instant),
    Column("heartbeat_at", Instant),
    Column("finished_at", Instant),
    Column("cancel_requested", Boolean, nullable=False),
    Column("result_id", Words),
    Column("outcome_json", Words),
    Column("num_events", Integer, nullable=False),
    UniqueConstraint("project_id", "submit_key"),
    Index(None, "state", "position"),
    Index(None, "project_id", "position"),
    Index(None, "project_id", "request_digest"),
    sqlite_autoincrement=True,
)

JOB_EVENTS = Table(
    "job_events",
    METADATA,
    Column("job_id", Words, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    _created_at(),
    Column("attempt", Integer, nullable=False),
    Column("kind", Words, nullable=False),
    Column("data_json", Words, nullable=False),
)

ANSWERS = Table(
    "idempotent_answers",
    METADATA,
    Column("project_id", Words, ForeignKey("projects.id"), primary_key=True),
    Column("key", Words, primary_key=True),
    Column("request_digest", Words, nullable=False),
    Column("holder", Words),
    _created_at(),
    Column("leased_until", Instant, nullable=False),
    Column("expires_at", Instant, nullable=False, index=True),
    Column("answer", Words),
)

REUSE = Table(
    "reusable_results",
    METADATA,
    Column("project_id", Words, ForeignKey("projects.id"), primary_key=True),
    Column("kind", Words, primary_key=True),
    Column("request_digest", Words, primary_key=True),
    _created_at(),
    Column("result_id", Words, nullable=False),
)

AUDIT = Table(
    "audit_log",
    METADATA,
    position(),
    _created_at(),
    Column("project_id", Words),
    Column("key_id", Words),
    Column("action", Words, nullable=False),
    Column("outcome", Words, nullable=False),
    Column("object_id", Words),
    Column("request_id", Words),
    Column("address", Words),
    Column("details_json", Words, nullable=False),
    Index(None, "project_id", "position"),
    sqlite_autoincrement=True,
)
