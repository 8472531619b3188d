"""Keyset pagination: pages of a list, newest first, that are stable while rows are added.

A cursor holds the position of the last row seen. Rows added later have greater positions and so
belong to no later page; removed rows leave no gap.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, Table

from ...core.errors import InvalidInput
from .records import Page

Item = TypeVar("Item")
MAX_CURSOR_CHARACTERS = 100
MAX_POSITION = 2**63 - 1


def fetch_page(
    connection: Connection,
    statement: Select[Any],
    table: Table,
    to_item: Callable[[Row[Any]], Item],
    *,
    limit: int,
    cursor: str | None,
) -> Page[Item]:
    """Return one page of a statement that selects ``table.c.position`` among other columns.

    Raises:
        InvalidInput: The cursor is not one of this table's lists.
    """
    if cursor is not None:
        statement = statement.where(table.c.position < _position(table, cursor))
    newest = statement.order_by(table.c.position.desc()).limit(limit + 1)
    rows = connection.execute(newest).all()
    more = len(rows) > limit  # one row beyond the page was asked for
    return Page(
        items=tuple(map(to_item, rows[:limit])),
        next_cursor=_cursor(table, rows[limit - 1].position) if more else None,
    )


def _cursor(table: Table, position: int) -> str:
    return base64.urlsafe_b64encode(f"{table.name}:{position}".encode()).decode().rstrip("=")


def _position(table: Table, cursor: str) -> int:
    name, _, position = _decode(cursor).partition(":")
    if name != table.name or not position.isdecimal() or int(position) > MAX_POSITION:
        raise InvalidInput(
            f"invalid cursor {cursor[:MAX_CURSOR_CHARACTERS]!r} for this list; use the "
            "next_cursor of an earlier page, or start without a cursor",
            field="/cursor",
        )
    return int(position)


def _decode(cursor: str) -> str:
    """Return a cursor's text; empty if it cannot be decoded."""
    if len(cursor) > MAX_CURSOR_CHARACTERS:
        return ""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded.encode(), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return ""
