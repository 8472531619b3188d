"""Claims of idempotency keys belong to whoever made them; those of before to nobody."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("idempotent_answers", sa.Column("holder", sa.Text()))
