"""Projects, keys, graphs, jobs, answers and the audit log; every document has a project.

Documents of before belong to the default project.
"""

import json
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

DEFAULT_PROJECT = "project_default"
OLD = ("plans", "profiles")


def upgrade() -> None:
    for name in OLD:
        op.execute(f"CREATE TABLE old_{name} AS SELECT * FROM {name}")
        op.drop_table(name)
    projects = _make_projects()
    now = datetime.now(UTC).replace(tzinfo=None)
    op.bulk_insert(projects, [{"id": DEFAULT_PROJECT, "name": "default", "created_at": now}])
    _make_documents()
    _make_jobs()
    _make_answers()
    _make_audit()
    for name in reversed(OLD):
        _move(name)
        op.drop_table(f"old_{name}")


def _make_projects() -> sa.Table:
    projects = op.create_table(
        "projects",
        _position(),
        _text("id", unique=True),
        _instant("created_at", nullable=False),
        _text("name", unique=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "api_keys",
        _position(),
        _project(),
        _text("id", unique=True),
        _instant("created_at", nullable=False),
        _text("name"),
        _text("secret_digest", unique=True),
        _text("scopes"),
        _text("quotas"),
        _instant("expires_at"),
        _instant("revoked_at"),
        _instant("last_used_at"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])
    return projects


def _make_documents() -> None:
    counted = (_text("model"), sa.Column("num_layers", sa.Integer(), nullable=False))
    estimated: sa.Column[bool] = sa.Column("estimated", sa.Boolean(), nullable=False)
    _make_document_table("profiles", *counted, estimated)
    counted = (_text("model"), sa.Column("num_layers", sa.Integer(), nullable=False))
    _make_document_table("graphs", *counted)
    _make_document_table(
        "plans",
        _text("profile_id"),
        _text("status"),
        _text("model", nullable=True),
        sa.Column("num_stages", sa.Integer()),
        sa.Column("step_time_s", sa.Float()),
        sa.ForeignKeyConstraint(
            ["project_id", "profile_id"], ["profiles.project_id", "profiles.id"]
        ),
    )
    op.create_index("ix_plans_project_id_profile_id", "plans", ["project_id", "profile_id"])


def _make_document_table(name: str, *columns: Any) -> None:
    op.create_table(
        name,
        _position(),
        _project(),
        _text("id"),
        _instant("created_at", nullable=False),
        *columns,
        _text("document"),
        sa.UniqueConstraint("project_id", "id"),
        sqlite_autoincrement=True,
    )


def _make_jobs() -> None:
    op.create_table(
        "jobs",
        _position(),
        _project(),
        _text("id", unique=True),
        _instant("created_at", nullable=False),
        _text("kind"),
        _text("state"),
        sa.Column("attempt", sa.Integer(), nullable=False),
        _text("request_json"),
        *(
            _text(name, nullable=True)
            for name in ("request_digest", "submit_key", "key_id", "needs")
        ),
        _instant("deadline_at"),
        _text("worker", nullable=True),
        *(_instant(name) for name in ("started_at", "heartbeat_at", "finished_at")),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        *(_text(name, nullable=True) for name in ("result_id", "outcome_json")),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.UniqueConstraint("project_id", "submit_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_state_position", "jobs", ["state", "position"])
    op.create_index("ix_jobs_project_id_position", "jobs", ["project_id", "position"])
    op.create_index("ix_jobs_project_id_request_digest", "jobs", ["project_id", "request_digest"])
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.Text(), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        _instant("created_at", nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        _text("kind"),
        _text("data_json"),
    )


def _make_answers() -> None:
    op.create_table(
        "idempotent_answers",
        _project(primary_key=True),
        _text("key", primary_key=True),
        _text("request_digest"),
        _instant("created_at", nullable=False),
        _instant("leased_until", nullable=False),
        _instant("expires_at", nullable=False),
        _text("answer", nullable=True),
    )
    op.create_index("ix_idempotent_answers_expires_at", "idempotent_answers", ["expires_at"])
    op.create_table(
        "reusable_results",
        _project(primary_key=True),
        _text("kind", primary_key=True),
        _text("request_digest", primary_key=True),
        _instant("created_at", nullable=False),
        _text("result_id"),
    )


def _make_audit() -> None:
    op.create_table(
        "audit_log",
        _position(),
        _instant("created_at", nullable=False),
        *(_text(name, nullable=True) for name in ("project_id", "key_id")),
        *(_text(name) for name in ("action", "outcome")),
        *(_text(name, nullable=True) for name in ("object_id", "request_id", "address")),
        _text("details_json"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_log_project_id_position", "audit_log", ["project_id", "position"])


def _move(name: str) -> None:
    """Copy a table's rows in order, one at a time: a document may have megabytes."""
    connection = op.get_bind()
    old, new = (
        sa.Table(table, sa.MetaData(), autoload_with=connection) for table in (f"old_{name}", name)
    )
    positions = connection.execute(sa.select(old.c.position).order_by(old.c.position)).scalars()
    for position in positions.all():
        row = connection.execute(sa.select(old).where(old.c.position == position)).one()
        values = dict(row._mapping)
        del values["position"]
        created_at = datetime.fromisoformat(values["created_at"])  # written in UTC
        values |= {"project_id": DEFAULT_PROJECT, "created_at": created_at.replace(tzinfo=None)}
        if name == "profiles":
            values |= _described(json.loads(values["document"]))
        connection.execute(sa.insert(new).values(**values))


def _described(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a profile besides its document."""
    return {
        "model": profile.get("model", ""),
        "num_layers": len(profile["layers"]),
        "estimated": profile.get("provenance", {}).get("source") == "estimated",
    }


def _position() -> sa.Column[int]:
    kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column("position", kind, primary_key=True)


def _project(**options: Any) -> sa.Column[str]:
    """Return the column for the project that owns a row."""
    owner = sa.ForeignKey("projects.id")
    return sa.Column("project_id", sa.Text(), owner, **{"nullable": False, **options})


def _text(name: str, *, nullable: bool = False, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable, **options)


def _instant(name: str, *, nullable: bool = True) -> sa.Column[datetime]:
    """Return a column for a time in UTC."""
    return sa.Column(name, sa.DateTime(), nullable=nullable)
