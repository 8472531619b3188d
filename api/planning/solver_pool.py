"""Searching for plans in processes of their own, so that no search slows another request down."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.synchronize
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import InvalidInput
from ...core.profile.profile import Profile
from ...schedules import numba_jit as jit
from ..errors import SolverEnded
from ..telemetry.tracing import span
from .kernel_compiler import Compiler
from .solver_process import PlanningProcess

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


class Solver:
    """Runs work that keeps a processor busy, away from the event loop.

    Searches may take as long as they are allowed. Whatever is short never waits behind them: it
    has a process more than they have.

    Args:
        processes: How many for searches; with 0, a few threads of the server's own process
            instead.
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
        number = processes + 1 if processes else 0
        self._all = [PlanningProcess(self._start) for _ in range(number)]
        self._idle = list(self._all)
        self._compiler: Compiler | None = None
        self._is_closed = False
        self._turns = asyncio.Semaphore(number or MAX_IN_THREADS)
        self._searches = asyncio.Semaphore(processes or MAX_IN_THREADS - 1)

    async def search(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, of what may take long."""
        await self._acquire(self._searches)
        try:
            return await self.run(work, *args, **kwargs)
        finally:
            self._searches.release()

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What a function returns; in a process, it and all it takes and gives is pickled.

        Cancelling it ends its process.

        Raises:
            InvalidInput: It needed more memory than a process gets.
            SolverEnded: Its process ended; no other call's did.
            Exception: Whatever the function raises.
        """
        async with self._turn(getattr(work, "__name__", "other")):
            if not self._processes:
                return await run_in_threadpool(work, *args, **kwargs)
            process = self._idle.pop()
            try:
                return await process.run(work, *args, **kwargs)
            except MemoryError:
                raise InvalidInput(
                    f"planning needs more than the {MAX_BYTES // 2**30} GiB this server gives it; "
                    "ask for fewer micro-batches or stages, or plan with the library",
                    field="/options",
                ) from None
            finally:
                # The next call takes the last: not one that has to start, if it can be helped.
                self._idle.insert(len(self._idle) if process.is_started else 0, process)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One of the processes is this call's, and its time is noted."""
        await self._acquire(self._turns)
        self.num_running += 1
        started = time.perf_counter()
        try:
            with span("stagewright.solve", work=name):
                yield
        finally:
            self._observe(name, time.perf_counter() - started)
            self.num_running -= 1
            self._turns.release()

    async def _acquire(self, limit: asyncio.Semaphore) -> None:
        self.num_waiting += 1
        try:
            await limit.acquire()
        finally:
            self.num_waiting -= 1

    def check(self) -> None:
        """Return if the next call will find a process; ended ones are replaced first.

        Raises:
            SolverEnded: No process starts.
        """
        try:
            for process in self._idle[-1:]:
                process.prepare()
        except OSError as error:
            raise SolverEnded(f"no planning process starts: {error}") from None

    def close(self) -> None:
        """End the processes, whatever they are at; none starts any more."""
        self._is_closed = True
        if self._compiler is not None:
            self._compiler.close()
        for ended in [process.end() for process in self._all]:
            for process in ended:
                process.join()

    def _start(self) -> ProcessPoolExecutor:
        if self._is_closed:
            raise SolverEnded("this server is stopping; ask again")
        if self._compiler is None:
            self._compiler = Compiler()
        return ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(os.getpid(), self._compiler.done),
        )


def _reduced(profile: Profile) -> tuple[Callable[[str], Profile], tuple[str]]:
    """How a profile is sent to another process: as JSON, which is read once for many requests."""
    return _read_profile, (profile.to_json(),)


@lru_cache(maxsize=PROFILES_KEPT)
def _read_profile(text: str) -> Profile:
    return Profile.model_validate_json(text)


ForkingPickler.register(Profile, _reduced)


def _prepare(parent: int, compiled: multiprocessing.synchronize.Event) -> None:
    """Limit this process, and have it end with the server, however that ends.

    numba is loaded whatever is asked first, once it has nothing to compile: it takes a second, and
    from then on a plan of twenty layers takes 15 ms instead of 80.
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

    def load() -> None:
        compiled.wait()
        jit.load_if_worthwhile(jit.LARGE_STEPS)

    threading.Thread(target=watch, daemon=True).start()
    if compiled.is_set():
        load()
    else:
        threading.Thread(target=load, daemon=True).start()
