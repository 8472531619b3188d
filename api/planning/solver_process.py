"""One process that plans, one call after another; whoever ends it ends that call alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import ParamSpec, TypeVar

from ..errors import SolverEnded

P = ParamSpec("P")
R = TypeVar("R")


class PlanningProcess:
    """Starts when it is first called, and anew after it ended.

    Args:
        start: A pool of one process; the process itself may start later.
    """

    def __init__(self, start: Callable[[], ProcessPoolExecutor]) -> None:
        self._start = start
        self._pool: ProcessPoolExecutor | None = None

    @property
    def is_started(self) -> bool:
        """Whether the next call finds it there."""
        return self._pool is not None

    def prepare(self) -> ProcessPoolExecutor:
        """What takes the next call, which is not under way yet; an ended process is replaced.

        Raises:
            OSError: None starts.
        """
        if self._pool is not None and not _is_whole(self._pool):
            self.end()
        if self._pool is None:
            self._pool = self._start()
        return self._pool

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns. Whoever stops waiting (`asyncio.CancelledError`) ends it.

        Raises:
            SolverEnded: The process ended.
            Exception: Whatever the function raises.
        """
        pool = self.prepare()
        running: asyncio.Future[R] | None = None
        try:
            running = asyncio.wrap_future(pool.submit(work, *args, **kwargs))
            return await asyncio.shield(running)  # a cancelled future is one too many for the pool
        except asyncio.CancelledError:
            if running is not None:
                running.add_done_callback(_seen)
            self.end()
            raise
        except BrokenProcessPool:
            self.end()
            raise SolverEnded(
                "the process that planned was ended, most likely for want of memory; ask for "
                "fewer micro-batches or stages, or ask again later"
            ) from None

    def end(self) -> list[BaseProcess]:
        """Kill it, whatever it is at; what is to be waited for is given back."""
        pool, self._pool = self._pool, None
        if pool is None:
            return []
        processes: list[BaseProcess] = list((pool._processes or {}).values())
        for process in processes:
            with suppress(ProcessLookupError, ValueError):
                process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        return processes


def _seen(running: asyncio.Future[R]) -> None:
    """That its process was ended is no news; asyncio would report it."""
    if not running.cancelled():
        running.exception()


def _is_whole(pool: ProcessPoolExecutor) -> bool:
    """Whether it takes work; it gives up for good when its process ends."""
    return not pool._broken and all(
        process.is_alive() for process in (pool._processes or {}).values()
    )
