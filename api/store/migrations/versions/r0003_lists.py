"""Columns shown in lists of plans and models, filled from the stored documents."""

import json
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

ROWS_AT_ONCE = 5
"""A profile of 10,000 layers has up to 15 MB."""

MAX_NUMBER = 2**63 - 1


def upgrade() -> None:
    op.add_column("profiles", sa.Column("family", sa.Text()))
    op.add_column("profiles", sa.Column("num_parameters", sa.BigInteger()))
    op.add_column("plans", sa.Column("devices", sa.Text()))
    op.add_column("plans", sa.Column("schedule", sa.Text()))
    for name in ("plans", "profiles", "graphs"):  # or a page of a list sorts all there are
        op.create_index(f"ix_{name}_project_id_position", name, ["project_id", "position"])
    _fill("profiles", _of_profile)
    _fill("plans", _of_plan)


def _fill(name: str, values_of: Any) -> None:
    """Give every row what its document says; documents are read a few at a time."""
    connection = op.get_bind()
    table = sa.Table(name, sa.MetaData(), autoload_with=connection)
    last = -1
    while True:
        rows = connection.execute(
            sa.select(table.c.position, table.c.document)
            .where(table.c.position > last)
            .order_by(table.c.position)
            .limit(ROWS_AT_ONCE)
        ).all()
        if not rows:
            return
        for row in rows:
            values = values_of(json.loads(row.document))
            changed = sa.update(table).where(table.c.position == row.position)
            connection.execute(changed.values(**values))
        last = rows[-1].position


def _of_profile(profile: dict[str, Any]) -> dict[str, Any]:
    listed = sum(
        one.get("numel", 0)
        for one in profile.get("parameters", ())
        if one.get("kind", "parameter") == "parameter"
    )
    spec = profile.get("spec") or {}
    return {
        "family": spec.get("family"),
        "num_parameters": listed if 0 < listed <= MAX_NUMBER else None,
    }


def _of_plan(record: dict[str, Any]) -> dict[str, Any]:
    kinds = [device.get("kind", "device") for device in record["cluster"]["devices"]]
    runs = [f"{len(list(run))} x {kind[:40]}" for kind, run in groupby(kinds)]
    more = [f"{len(runs) - 4} more runs"] if len(runs) > 4 else []
    answer = record.get("plan") or record["options"]
    return {"devices": ", ".join([*runs[:4], *more]), "schedule": answer.get("schedule", "1f1b")}
