"""Fields that every stored row carries."""

from __future__ import annotations

from datetime import datetime

from ..document import Record


class Stored(Record):
    """What every row carries: its id, and when it was first stored (UTC)."""

    id: str
    created_at: datetime
