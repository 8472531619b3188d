"""Fair limits: shares of what clients hold at once, and turns at what runs at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ..core.errors import DeadlineExceeded


class FairTurns:
    """Limit on what runs at once, with a queue for each project; belongs to one event loop.

    Places are handed out round robin: a project that got one goes to the end of the line, and
    inside a project the first to ask is the first served.

    Args:
        limit: Places of all projects.
        for_project: Places of one project: where that is fewer, others find one at once.
    """

    def __init__(self, limit: int, for_project: int | None = None) -> None:
        self._limit, self._for_project = limit, for_project
        self._held: Counter[str] = Counter()
        self.num_waiting = 0
        # In the order of their turns; a project is listed while anything of it waits.
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Return True if a place would be had without waiting."""
        return self._held.total() < self._limit

    @asynccontextmanager
    async def place(self, project: str, until_s: float = math.inf) -> AsyncIterator[None]:
        """Wait for this project's turn, and hold a place for the duration of the block.

        Args:
            project: Whose turn it takes.
            until_s: When to give up waiting, on the monotonic clock.

        Raises:
            DeadlineExceeded: It was not the project's turn in time.
        """
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(project, deque()).append(turn)
        self.num_waiting += 1
        self._hand_out()
        try:
            await self._wait(project, turn, until_s - time.monotonic())
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._give_back(project)

    async def _wait(self, project: str, turn: asyncio.Future[None], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                try:
                    await turn
                except asyncio.CancelledError:
                    # Cancelled after the place was handed over, but before this task ran again.
                    if turn.done() and not turn.cancelled():
                        self._give_back(project)
                    raise
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed before it was this request's turn; ask again later, or, where "
                "the request sets a deadline, allow more time"
            ) from None

    def resize(self, limit: int) -> None:
        """Change the number of places; those that are held beyond it are not taken away."""
        self._limit = limit
        self._hand_out()

    def _give_back(self, project: str) -> None:
        self._held -= Counter([project])  # without those that hold none
        self._hand_out()

    def _hand_out(self) -> None:
        most = self._limit if self._for_project is None else self._for_project
        while self.has_room:
            project = next((name for name in self._queues if self._held[name] < most), None)
            if project is None:
                return
            queue = self._queues.pop(project)
            turn = queue.popleft()
            if queue:
                self._queues[project] = queue
            if not turn.cancelled():
                self._held[project] += 1
                turn.set_result(None)


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
