"""Projects of the service, and their API keys without secrets."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ..document import Record
from .documents import Stored


class Project(Stored):
    """Owner of keys, documents and jobs, which no other project can see."""

    name: str


class ProjectList(Record):
    """Projects, oldest first."""

    projects: tuple[Project, ...]


class Quotas(Record):
    """Quotas of a key; `None` for the server's defaults.

    Attributes:
        max_requests_per_minute: Enforced by each server process.
        max_unfinished_jobs: Jobs queued or running at a time.
    """

    max_requests_per_minute: int | None = Field(None, ge=1)
    max_unfinished_jobs: int | None = Field(None, ge=0)


class ApiKey(Stored):
    """A stored key, from which its secret cannot be derived."""

    project_id: str
    name: str
    scopes: tuple[str, ...]
    quotas: Quotas = Quotas()
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class NewApiKey(Record):
    """A newly created key, with its secret, which is never shown again."""

    key: ApiKey
    secret: str = Field(repr=False)


class KeyList(Record):
    """One page of keys, newest first, including those revoked or expired not long ago."""

    keys: tuple[ApiKey, ...]
    next_cursor: str | None = None
