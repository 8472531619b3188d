"""The stored audit log."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Row, insert, select

from .database import Database
from .pagination import fetch_page
from .records import AuditEntry, AuditEvent, Page
from .tables import AUDIT


class AuditLog:
    """Log of actions and their authors; only retention removes lines, and nothing changes one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, event: AuditEvent) -> None:
        """Append a line."""
        values = {**dict(event), "details_json": json.dumps(event.details)}
        del values["details"]
        with self._database.write() as connection:
            connection.execute(insert(AUDIT).values(created_at=self._database.now(), **values))

    def entries(
        self, *, project_id: str | None = None, limit: int, cursor: str | None = None
    ) -> Page[AuditEntry]:
        """Return lines of one project or of all, newest first."""
        rows = select(AUDIT)
        if project_id is not None:
            rows = rows.where(AUDIT.c.project_id == project_id)
        with self._database.read() as connection:
            return fetch_page(connection, rows, AUDIT, _entry, limit=limit, cursor=cursor)


def _entry(row: Row[Any]) -> AuditEntry:
    values = dict(row._mapping)
    details = json.loads(values.pop("details_json"))
    return AuditEntry(number=values.pop("position"), details=details, **values)
