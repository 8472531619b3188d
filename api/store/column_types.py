"""Column types with equal semantics on SQLite and PostgreSQL."""

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
"""Names of constraints and indexes, in the tables and in every migration."""


class Instant(TypeDecorator[datetime]):
    """A time with a zone, stored as UTC: SQLite has no zones and compares times as text."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Words(TypeDecorator[str]):
    """Text from clients; what PostgreSQL cannot store (NUL, lone surrogates) is replaced.

    Parameters of queries are replaced too, so an id containing a NUL is simply not found.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def position() -> Column[int]:
    """Return a column for the order of insertion; never reused, or a cursor could skip a row."""
    return Column("position", BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
