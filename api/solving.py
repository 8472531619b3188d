"""Searching for plans in processes of their own, so that no search slows another request down."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ..core.errors import InvalidInput, StagewrightError
from ..core.profile import Profile
from ..schedules import jit
from .telemetry.tracing import span

P = ParamSpec("P")
R = TypeVar("R")

MAX_IN_THREADS = 2
"""Without processes; more would only slow each other down."""

MAX_BYTES = 8 * 2**30
"""Address space of one process. Where the largest request allowed needed 0.7 GB (see `effort`),
numpy and numba map several more that they never touch."""

PARENT_CHECKED_S = 1.0

PROFILES_KEPT = 8
"""As read, in each planning process. The largest allowed take some hundred MB."""

NICENESS = 5
"""Of these processes: while a search keeps every processor busy, requests are answered first."""


def _unobserved(work: str, duration_s: float) -> None:
    """Nobody wants to know."""


class SolverEnded(StagewrightError):
    """A planning process was ended from outside, most likely for want of memory."""


class Solver:
    """Runs work that keeps a processor busy, away from the event loop.

    Args:
        processes: How many; with 0, a few threads of the server's own process instead.
        observe: Told the name of every function that was run, and how many seconds it took.

    Attributes:
        num_waiting: Calls that wait for a process.
        num_running: Calls that have one.
    """

    def __init__(self, processes: int, observe: Callable[[str, float], None] = _unobserved) -> None:
        self._processes = processes
        self._observe = observe
        self.num_waiting = 0
        self.num_running = 0
        self._pool: ProcessPoolExecutor | None = None
        self._turns = asyncio.Semaphore(processes or MAX_IN_THREADS)

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns; in a process, it and all it takes and gives is pickled.

        Raises:
            InvalidInput: It needed more memory than a process gets.
            SolverEnded: Its process ended.
            Exception: Whatever the function raises.
        """
        async with self._turn(getattr(work, "__name__", "other")):
            if not self._processes:
                return await run_in_threadpool(work, *args, **kwargs)
            pool = self._running()
            try:
                return await asyncio.wrap_future(pool.submit(work, *args, **kwargs))
            except BrokenProcessPool:
                if self._pool is pool:
                    self._pool = None
                pool.shutdown(wait=False, cancel_futures=True)
                raise SolverEnded(
                    "the process that planned was ended, most likely for want of memory; ask for "
                    "fewer micro-batches or stages, or ask again later"
                ) from None
            except MemoryError:
                raise InvalidInput(
                    f"planning needs more than the {MAX_BYTES // 2**30} GiB this server gives it; "
                    "ask for fewer micro-batches or stages, or plan with the library",
                    field="/options",
                ) from None

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One of the processes is this call's, and its time is noted."""
        self.num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        started = time.perf_counter()
        try:
            with span("stagewright.solve", work=name):
                yield
        finally:
            self._observe(name, time.perf_counter() - started)
            self.num_running -= 1
            self._turns.release()

    def check(self) -> None:
        """Return if the next call will find a process; ended ones are replaced first.

        Raises:
            SolverEnded: No process starts.
        """
        if not self._processes:
            return
        if self._pool is not None and not _is_whole(self._pool):
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        try:
            self._running()
        except OSError as error:
            raise SolverEnded(f"no planning process starts: {error}") from None

    def close(self) -> None:
        """End the processes, whatever they are at."""
        if self._pool is None:
            return
        running = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
        for process in running:
            process.join()

    def _running(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_prepare,
                initargs=(os.getpid(),),
            )
        return self._pool


def _is_whole(pool: ProcessPoolExecutor) -> bool:
    """Whether it takes work; it gives up for good when a process of it ends."""
    return not pool._broken and all(
        process.is_alive() for process in (pool._processes or {}).values()
    )


def _reduced(profile: Profile) -> tuple[Callable[[str], Profile], tuple[str]]:
    """How a profile is sent to another process: as JSON, which is read once for many requests."""
    return _read_profile, (profile.to_json(),)


@lru_cache(maxsize=PROFILES_KEPT)
def _read_profile(text: str) -> Profile:
    return Profile.model_validate_json(text)


ForkingPickler.register(Profile, _reduced)


def _prepare(parent: int) -> None:
    """Limit this process, and have it end with the server, however that ends.

    numba is loaded whatever is asked first: it takes a second, and from then on a plan of twenty
    layers takes 15 ms instead of 80.
    """
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECKED_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    jit.prepare(jit.LARGE_STEPS)
