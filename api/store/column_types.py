"""Kinds of columns that mean the same on every database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, Column, DateTime, Dialect, Integer, Text, TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
"""What constraints and indexes are called, here and in every migration."""


class Instant(TypeDecorator[datetime]):
    """A moment with its time zone, kept as UTC: SQLite has no zones, and sorts times as text."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Words(TypeDecorator[str]):
    """Text that strangers chose. What PostgreSQL cannot hold (NUL, lone surrogates) is replaced.

    Values to compare with are replaced alike, so an id with a NUL in it is merely not there.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def position() -> Column[int]:
    """Order of insertion. Never given twice, or a cursor could skip a row."""
    return Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
