"""Stored size of each project, which a server may limit."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    column = sa.Column("stored_size", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("projects", column)
    total = " + ".join(
        f"(SELECT coalesce(sum(length({text})), 0) FROM {name} WHERE project_id = projects.id)"
        for name, text in (
            ("profiles", "document"),
            ("graphs", "document"),
            ("plans", "document"),
            ("idempotent_answers", "answer"),
        )
    )
    op.execute(f"UPDATE projects SET stored_size = {total}")
