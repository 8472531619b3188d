"""Profiles and plans, as they were before there were migrations."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("position", sa.Integer(), primary_key=True),
        sa.Column("id", sa.String(), nullable=False, unique=True),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("position", sa.Integer(), primary_key=True),
        sa.Column("id", sa.String(), nullable=False, unique=True),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.Column("profile_id", sa.String(), sa.ForeignKey("profiles.id"), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("model", sa.String()),
        sa.Column("num_stages", sa.Integer()),
        sa.Column("step_time_s", sa.Float()),
        sa.Column("document", sa.Text(), nullable=False),
    )
