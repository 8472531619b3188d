"""Pool of solver processes, so that no search slows another request down."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.synchronize
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import InvalidInput
from ...core.profile.profile import Profile
from ...planner import numba_cache
from ...schedules import numba_jit as jit
from ..errors import SolverEnded
from ..telemetry.tracing import span

P = ParamSpec("P")
R = TypeVar("R")

MAX_IN_THREADS = 2
"""Calls at a time without processes; more threads would only slow each other down."""

MAX_BYTES = 8 * 2**30
"""Address space of one process. The largest request allowed needed 0.7 GB (see `admission`);
numpy and numba map several more that they never touch."""

PARENT_CHECKED_S = 1.0

PROFILES_KEPT = 8
"""Parsed profiles cached in each process. The largest allowed take some hundred MB."""

NICENESS = 5
"""Of solver processes: while searches keep every core busy, the server still answers first."""

COMPILE = (
    sys.executable,
    "-c",
    f"import os; os.nice(14); from {numba_cache.__name__} import compile_all; compile_all()",
)
"""Niced below everything else: plans are found without the kernels, too."""

_log = logging.getLogger(__name__)


class Solver:
    """Executor of CPU-bound work away from the event loop.

    Searches may take as long as they are allowed to. Short work never waits behind them, since
    there is one process more than searches may use.

    Args:
        processes: Processes for searches; with 0, a few threads of the server's own process.
        observe: Called with the name of each function that was run and its duration in seconds.
            The name is a label of the metrics, so renaming such a function changes them.
    """

    def __init__(
        self, processes: int, observe: Callable[[str, float], None] = lambda work, duration_s: None
    ) -> None:
        self._processes = processes
        self._observe = observe
        self.num_waiting = 0
        self.num_running = 0
        number = processes + 1 if processes else 0
        self._all = [SolverProcess(self._start) for _ in range(number)]
        self._idle = list(self._all)
        self._compiler: Compiler | None = None
        self._is_closed = False
        self._calls = asyncio.Semaphore(number or MAX_IN_THREADS)
        self._searches = asyncio.Semaphore(processes or MAX_IN_THREADS - 1)

    async def search(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that may take long; see `run`."""
        # Searches queue here, before they take one of `_calls`: that leaves one for short work.
        await self._acquire(self._searches)
        try:
            return await self.run(work, *args, **kwargs)
        finally:
            self._searches.release()

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in a solver process; function, arguments and result are pickled.

        Cancelling the call kills its process.

        Raises:
            InvalidInput: The work needed more memory than a process has.
            SolverEnded: The process ended; other calls are unaffected.
        """
        async with self._measured(getattr(work, "__name__", "other")):
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
    async def _measured(self, name: str) -> AsyncIterator[None]:
        await self._acquire(self._calls)
        self.num_running += 1
        started = time.perf_counter()
        try:
            with span("stagewright.solve", work=name):
                yield
        finally:
            self._observe(name, time.perf_counter() - started)
            self.num_running -= 1
            self._calls.release()

    async def _acquire(self, semaphore: asyncio.Semaphore) -> None:
        self.num_waiting += 1
        try:
            await semaphore.acquire()
        finally:
            self.num_waiting -= 1

    def check(self) -> None:
        """Make sure that the next call finds a process; replace one that has ended.

        Raises: SolverEnded.
        """
        try:
            for process in self._idle[-1:]:
                process.prepare()
        except OSError as error:
            raise SolverEnded(f"no solver process starts: {error}") from None

    def close(self) -> None:
        """Kill the processes, busy or not; none starts any more."""
        self._is_closed = True
        if self._compiler is not None:
            self._compiler.close()
        # All are killed before any is waited for, so that they end side by side.
        for ended in [process.end() for process in self._all]:
            for process in ended:
                process.join()

    def _start(self) -> ProcessPoolExecutor:
        if self._is_closed:
            raise SolverEnded("this server is shutting down; ask again")
        if self._compiler is None:
            self._compiler = Compiler()
        # Spawned: a fork of this process, which has threads, could inherit a lock that is held.
        return ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(os.getpid(), self._compiler.done),
        )


class SolverProcess:
    """One process that takes one call at a time, started at the first and restarted if it ends.

    A pool of several would be killed as a whole when one of its processes ends, and every other
    search with it.
    """

    def __init__(self, start: Callable[[], ProcessPoolExecutor]) -> None:
        self._start = start
        self._pool: ProcessPoolExecutor | None = None

    @property
    def is_started(self) -> bool:
        """Return True if the next call need not start the process."""
        return self._pool is not None

    def prepare(self) -> ProcessPoolExecutor:
        """Return the pool for the next call, with a new process if the last one ended.

        Raises: OSError.
        """
        if self._pool is not None and not _is_alive(self._pool):
            self.end()
        if self._pool is None:
            self._pool = self._start()
        return self._pool

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in the process; cancelling the call kills the process.

        Raises: SolverEnded.
        """
        pool = self.prepare()
        running: asyncio.Future[R] | None = None
        try:
            running = asyncio.wrap_future(pool.submit(work, *args, **kwargs))
            # Shielded: the pool must not see its own future cancelled while the work runs on.
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running is not None:
                # Otherwise asyncio would log that the exception was never retrieved.
                running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self.end()
            raise
        except BrokenProcessPool:
            self.end()
            raise SolverEnded(
                "the solver process was killed, most likely for lack of memory; ask for fewer "
                "micro-batches or stages, or ask again later"
            ) from None

    def end(self) -> list[BaseProcess]:
        """Kill the process, busy or not; return what the caller may join."""
        pool, self._pool = self._pool, None
        if pool is None:
            return []
        # The executor has no public way to kill a process that is busy (Python 3.14 adds one).
        processes: list[BaseProcess] = list((pool._processes or {}).values())
        for process in processes:
            with suppress(ProcessLookupError, ValueError):
                process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        return processes


class Compiler:
    """Process that compiles the kernels, if that is still to be done.

    It takes half a minute; then ``done``, which spawned processes share, is set, whether it
    succeeded or not. Small problems are planned in plain Python until then.
    """

    def __init__(self) -> None:
        self.done = multiprocessing.get_context("spawn").Event()
        self._process: subprocess.Popen[bytes] | None = None
        if numba_cache.is_done():
            self.done.set()
            return
        self._process = subprocess.Popen(COMPILE, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() > 0:  # negative when `close` killed it
            _log.warning("the planner's kernels could not be compiled: planning takes longer")
        self.done.set()


def _is_alive(pool: ProcessPoolExecutor) -> bool:
    # The executor notices the end of its process only with the next submission, or a little later.
    return not pool._broken and all(
        process.is_alive() for process in (pool._processes or {}).values()
    )


def _reduced(profile: Profile) -> tuple[Callable[[str], Profile], tuple[str]]:
    # As JSON, and not as thousands of pickled models: a process reads each text once and caches it.
    return _read_profile, (profile.to_json(),)


@lru_cache(maxsize=PROFILES_KEPT)
def _read_profile(text: str) -> Profile:
    return Profile.model_validate_json(text)


ForkingPickler.register(Profile, _reduced)


def _prepare(parent: int, compiled: multiprocessing.synchronize.Event) -> None:
    """Limit this process, tie its life to the server's, and load numba.

    Loading takes a second, once all is compiled. From then on a plan of twenty layers takes 15 ms
    instead of 80, whatever is asked first.
    """
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which drains first
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))

    def watch() -> None:
        # A server killed by SIGKILL ends no children; theirs is then another parent.
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
