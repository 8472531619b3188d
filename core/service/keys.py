"""Keys of the service, without their secrets."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from ..document import Record
from .stored import Stored


class Quotas(Record):
    """Limits of one key; `None` is no limit.

    Attributes:
        max_requests_per_minute: The store keeps it; who answers requests counts them.
        max_unfinished_jobs: Jobs queued or running at a time, see `Jobs.submit`.
    """

    max_requests_per_minute: int | None = Field(None, ge=1)
    max_unfinished_jobs: int | None = Field(None, ge=0)


class ApiKey(Stored):
    """A key as it is stored: its secret cannot be had from it."""

    project_id: str
    name: str
    scopes: tuple[str, ...]
    quotas: Quotas = Quotas()
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class NewApiKey(Record):
    """A key just made, and the only time its secret is seen."""

    key: ApiKey
    secret: str = Field(repr=False)


class KeyList(Record):
    """Keys, oldest first, revoked ones too."""

    keys: tuple[ApiKey, ...]
