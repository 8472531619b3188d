"""Limits on the amounts that one client, one project and all of them may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class FairShares:
    """Amounts held by each owner, with three limits; belongs to one event loop.

    A project may hold at most half of everything: one with many keys leaves the rest to others.
    """

    def __init__(self, for_one: int, for_all: int) -> None:
        self.for_one, self.for_project, self.for_all = for_one, for_all // 2, for_all
        self._by_owner: Counter[str] = Counter()
        self._by_project: Counter[str] = Counter()

    def has_room(self, owner: str, project: str, amount: int = 1) -> bool:
        """Return True if an owner may take this much more."""
        return (
            self._by_owner[owner] + amount <= self.for_one
            and self._by_project[project] + amount <= self.for_project
            and self._by_project.total() + amount <= self.for_all
        )

    def take(self, owner: str, project: str, amount: int = 0) -> Share:
        """Return a share that can be added to; the caller has to give it back."""
        share = Share(self, owner, project)
        share.add(amount)
        return share

    @contextmanager
    def share(self, owner: str, project: str) -> Iterator[Share]:
        """Yield a share that can be added to; its whole amount is given back at the end."""
        share = self.take(owner, project)
        try:
            yield share
        finally:
            share.give_back()

    def _change(self, owner: str, project: str, amount: int) -> None:
        for held, holder in ((self._by_owner, owner), (self._by_project, project)):
            held[holder] += amount
            if not held[holder]:  # holders come and go, and none is remembered
                del held[holder]


class Share:
    """One holder's part of the amounts of an owner and of its project."""

    def __init__(self, shares: FairShares, owner: str, project: str) -> None:
        self._shares, self._owner, self._project = shares, owner, project
        self.amount = 0

    def add(self, amount: int = 1) -> None:
        """Take more; a negative amount is given back."""
        self.amount += amount
        self._shares._change(self._owner, self._project, amount)

    def give_back(self) -> None:
        """Give the whole amount back; a second time changes nothing."""
        self.add(-self.amount)
