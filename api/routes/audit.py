"""``/v1/audit``: the audit log of the caller's project."""

from __future__ import annotations

from fastapi import APIRouter

from ...core.document import Record
from ..auth.access import AUDIT, CurrentPrincipal
from ..http.pagination import Cursor, Limit, cursor_checked
from ..openapi import PROBLEM_RESPONSE
from ..store.records import AuditEntry
from .dependencies import TheStore

router = APIRouter(prefix=AUDIT, tags=["operations"], responses=PROBLEM_RESPONSE)


class AuditList(Record):
    """A page of the audit log, newest entry first.

    Attributes:
        entries: The entries of this page.
        next_cursor: Cursor of the next page; `None` on the last.
    """

    entries: tuple[AuditEntry, ...]
    next_cursor: str | None = None


@router.get("")
def list_audit(
    store: TheStore, principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
) -> AuditList:
    """List what was created, changed, revoked or denied in this project, newest first.

    Entries that belong to no project, such as a denied request without a valid token, are visible
    to the operator only: ``stagewright audit``.
    """
    with cursor_checked():
        page = store.audit.entries(project_id=principal.project_id, limit=limit, cursor=cursor)
    return AuditList(entries=page.items, next_cursor=page.next_cursor)
