"""``/v1/audit``: who did what in the caller's project."""

from __future__ import annotations

from fastapi import APIRouter

from ...core.document import Record
from ..auth.principal import CurrentPrincipal
from ..auth.scopes import AUDIT
from ..http.pagination import Cursor, Limit, cursor_checked
from ..openapi import PROBLEM_RESPONSE
from ..store.base import Store
from ..store.records import AuditEntry


class AuditList(Record):
    """Lines of the audit log, newest first.

    Attributes:
        entries: The lines of this page.
        next_cursor: Asks for the page after this one; `None` on the last.
    """

    entries: tuple[AuditEntry, ...]
    next_cursor: str | None = None


def audit_routes(store: Store) -> APIRouter:
    """The route that reads the audit log; it needs the scope ``admin``."""
    router = APIRouter(prefix=AUDIT, tags=["operations"], responses=PROBLEM_RESPONSE)

    @router.get("")
    def list_audit(
        principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
    ) -> AuditList:
        """What was made, changed, revoked or refused in this project, newest first.

        What nobody's project is concerned by, such as a stranger's request that was refused, is
        for the operator alone: ``stagewright audit``.
        """
        with cursor_checked():
            page = store.audit.entries(project_id=principal.project_id, limit=limit, cursor=cursor)
        return AuditList(entries=page.items, next_cursor=page.next_cursor)

    return router
