"""The audit log in a table; see `contract.Audit`."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Row, insert, select

from .database import Database
from .pagination import page
from .records import AuditEntry, AuditEvent, Page
from .tables import AUDIT


class SqlAudit:
    """`contract.Audit` on a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, event: AuditEvent) -> None:
        values = dict(event)
        values["details_json"] = json.dumps(values.pop("details"))
        line = insert(AUDIT).values(created_at=self._database.now(), **values)
        with self._database.write() as connection:
            connection.execute(line)

    def entries(
        self, *, project_id: str | None = None, limit: int, cursor: str | None = None
    ) -> Page[AuditEntry]:
        rows = select(AUDIT)
        if project_id is not None:
            rows = rows.where(AUDIT.c.project_id == project_id)
        with self._database.read() as connection:
            return page(connection, rows, AUDIT, _entry, limit=limit, cursor=cursor)


def _entry(row: Row[Any]) -> AuditEntry:
    values = {name: row._mapping[name] for name in AuditEvent.model_fields if name != "details"}
    details = json.loads(row.details_json)
    return AuditEntry(number=row.position, created_at=row.created_at, details=details, **values)
