"""Base class of stored documents."""

from __future__ import annotations

from datetime import datetime

from ..document import Record


class Stored(Record):
    """A stored document: its id, and the time at which it was first stored (UTC)."""

    id: str
    created_at: datetime
