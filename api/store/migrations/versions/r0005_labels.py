"""Names, tags and notes of plans; earlier plans have none."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for name in ("name", "tags", "notes"):
        op.add_column("plans", sa.Column(name, sa.Text()))
