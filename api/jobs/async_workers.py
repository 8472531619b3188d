"""WorkerBackend asked from an event loop, by a few threads of their own.

A scheduler that is away keeps whoever asks waiting for seconds; requests must not wait with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..errors import WorkersUnavailable
from .messages import WorkerMessage, WorkerTask
from .workers import WorkerBackend

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 4

AGAIN_S = 2.0
"""Until workers that cannot be reached are tried again."""


class AsyncWorkers:
    """The `workers.Workers` behind it, without blocking; belongs to one event loop.

    Attributes:
        trouble: Why they cannot be reached, if so.
    """

    def __init__(self, workers: WorkerBackend) -> None:
        self.trouble: str | None = None
        self._workers = workers
        self._offers: Mapping[str, int] | None = None
        self._threads = ThreadPoolExecutor(THREADS, "workers")
        self._asking = asyncio.Lock()

    async def until_reached(self, needs: str | None) -> None:
        """Wait for them; one asks for all who wait. Learns what they offer if that is not it."""
        while not self.has(needs) or self.trouble is not None:
            async with self._asking:
                if self.trouble is None and self.has(needs):
                    return
                await self._ask()
                if self.trouble is None:
                    return
                await asyncio.sleep(AGAIN_S)

    async def refresh(self) -> None:
        """Learn again what is offered, unless somebody is at it."""
        if not self._asking.locked():
            await self.learn()

    async def learn(self) -> None:
        """Learn what is offered now."""
        async with self._asking:
            await self._ask()

    async def _ask(self) -> None:
        try:
            self._offers = await self._call(self._workers.offers)
            self.trouble = None
        except WorkersUnavailable as error:
            self.trouble = str(error)

    def has(self, needs: str | None) -> bool:
        """Whether somebody is known to offer it."""
        return bool(self._offers and self._offers.get(needs or ""))

    def offered(self) -> tuple[str, ...]:
        """What somebody was found to offer.

        Raises:
            WorkersUnavailable: They could not be reached.
        """
        if self.trouble is not None:
            raise WorkersUnavailable(self.trouble)
        return tuple(kind for kind, number in (self._offers or {}).items() if number)

    def message(self, needs: str) -> str | None:
        """What keeps a job from running that needs it, and what would help."""
        if self.trouble is not None or self._offers is None or self.has(needs):
            return self.trouble
        return f"no worker offers {needs}; {self._workers.invitation(needs)}"

    async def submit(self, task: WorkerTask, tell: Callable[[WorkerMessage], None]) -> None:
        """See `WorkerBackend.submit`."""
        try:
            await self._call(self._workers.submit, task, tell)
        except WorkersUnavailable as error:
            self.trouble = str(error)
            raise

    async def stop(self, key: str) -> None:
        """See `WorkerBackend.stop`."""
        await self._call(self._workers.stop, key)

    async def close(self) -> None:
        """See `WorkerBackend.close`."""
        await asyncio.to_thread(self._workers.close)  # the others may all wait for a connection
        self._threads.shutdown(wait=False)

    async def _call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: call(*args, **kwargs)
        )
