"""Shares of something limited: what each client holds of it, and all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class FairShares:
    """Amounts held by each owner, with a limit for one and for all; belongs to one event loop."""

    def __init__(self, for_one: int, for_all: int) -> None:
        self.for_one, self.for_all = for_one, for_all
        self._held: Counter[str] = Counter()

    def has_room(self, owner: str, amount: int = 1) -> bool:
        """Return True if an owner may take this much more."""
        return (
            self._held[owner] + amount <= self.for_one
            and self._held.total() + amount <= self.for_all
        )

    @contextmanager
    def share(self, owner: str) -> Iterator[Share]:
        """Yield a share that can be added to; its whole amount is given back at the end."""
        share = Share(self._held, owner)
        try:
            yield share
        finally:
            self._held[owner] -= share.amount
            if not self._held[owner]:
                del self._held[owner]


class Share:
    """One holder's part of an owner's amount."""

    def __init__(self, held: Counter[str], owner: str) -> None:
        self._held, self._owner = held, owner
        self.amount = 0

    def add(self, amount: int = 1) -> None:
        """Take more; a negative amount is given back."""
        self.amount += amount
        self._held[self._owner] += amount
