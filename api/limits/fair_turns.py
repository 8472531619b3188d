"""Fair scheduling: projects take turns at a limited number of places."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...core.errors import DeadlineExceeded


class FairTurns:
    """Limit on what runs at once, with a queue for each project; belongs to one event loop.

    Places are handed out round robin: a project that got one goes to the end of the line, and
    inside a project the first to ask is the first served.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_held = 0
        self.num_waiting = 0
        # In the order of their turns; a project is listed while anything of it waits.
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Return True if a place would be had without waiting."""
        return self._num_held < self._limit

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
            await self._wait(turn, until_s - time.monotonic())
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, turn: asyncio.Future[None], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                try:
                    await turn
                except asyncio.CancelledError:
                    # Cancelled after the place was handed over, but before this task ran again.
                    if turn.done() and not turn.cancelled():
                        self._give_back()
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

    def _give_back(self) -> None:
        self._num_held -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_held < self._limit and self._queues:
            project, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[project] = queue
            if not turn.cancelled():
                self._num_held += 1
                turn.set_result(None)
