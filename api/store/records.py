"""What a store keeps besides documents: projects, keys, answers and the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Generic, TypeVar

from pydantic import Field, JsonValue

from ...core.document import Record
from ...core.service.keys import ApiKey as ApiKey
from ...core.service.keys import NewApiKey as NewApiKey
from ...core.service.keys import Quotas as Quotas
from ...core.service.stored_tomerge import Stored as Stored

DEFAULT_PROJECT = "project_default"
"""The project of everything made without a key of another one. It always exists."""

Item = TypeVar("Item")


class Page(Record, Generic[Item]):
    """Part of a list.

    Attributes:
        items: The rows of this page.
        next_cursor: Asks for the page after this one; `None` on the last.
    """

    items: tuple[Item, ...]
    next_cursor: str | None = None


class Project(Stored):
    """Owner of keys and documents; what one project stores no other sees."""

    name: str


class Answer(Record):
    """A response to be given again for the same idempotency key.

    Attributes:
        status: HTTP status code.
        headers: Name and value, in order.
        body: Its text.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: str = ""


class AuditEvent(Record):
    """Something someone did.

    Attributes:
        action: What, e.g. ``plan.create``.
        outcome: How it ended, e.g. ``ok`` or the kind of problem.
        project_id: Where; `None` for the server as a whole.
        key_id: Who; `None` for the server's own token or nobody.
        object_id: To what, if to one thing.
        request_id: As in the server's log.
        address: Where the request came from.
        details: More.
    """

    action: str
    outcome: str
    project_id: str | None = None
    key_id: str | None = None
    object_id: str | None = None
    request_id: str | None = None
    address: str | None = None
    details: dict[str, JsonValue] = Field(default_factory=dict)


class AuditEntry(AuditEvent):
    """A line of the audit log; later ones have larger numbers."""

    number: int
    created_at: datetime


class Retention(Record):
    """How old things may get, in days; `None` keeps them for ever.

    Attributes:
        jobs_days: Finished jobs with their events, since they ended.
        audit_days: Lines of the audit log.
        plans_days: Plans, since they were first stored. Profiles and graphs follow once they
            are as old and no plan names them.
    """

    jobs_days: float | None = Field(30.0, ge=0)
    audit_days: float | None = Field(365.0, ge=0)
    plans_days: float | None = Field(None, ge=0)
