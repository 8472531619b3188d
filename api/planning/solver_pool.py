"""Pool of solver processes, so that no search slows another request down."""

from __future__ import annotations

import asyncio
import logging
import math
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
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import lru_cache, partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, InvalidInput
from ...core.profile.profile import Profile
from ...planner import numba_cache
from ...schedules import numba_jit as jit
from ..errors import SolverEnded
from ..http.fair_turns import FairTurns
from ..telemetry.tracing import span

P = ParamSpec("P")
R = TypeVar("R")

SHORT_S = 2.0
"""Longest short search. Sizes do not tell beforehand: 100 layers over 8 devices took 0.2 s of
processor time, 14 s with recomputation and replicas, and 0.04 s over 64 devices."""

GRACE_S = 1.5
"""Time that a search has to return its best plan after its deadline, before it is killed."""

MAX_WORK_S = 60.0
"""Longest work that is no search, such as drawing a timeline of 32,768 actions."""

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

LONG_NICENESS = 15
"""Of processes for long searches: beside a short one, each gets about a tenth of a core."""

COMPILE = (
    sys.executable,
    "-c",
    f"import os; os.nice(14); from {numba_cache.__name__} import compile_all; compile_all()",
)
"""Niced below everything else: plans are found without the kernels, too."""

_log = logging.getLogger(__name__)


class Solver:
    """Executor of CPU-bound work away from the event loop, which ends all of it in time.

    A search begins among the short ones; if it has not ended after `SHORT_S` it begins anew among
    the long ones, whose processes have a lower priority. So a search of a moment never waits for
    long ones, nor for the processors that those keep busy. Work that is no search has one process
    more than short searches may use.

    Args:
        processes: Long searches at once, and also short ones; with 0, a few threads of the server's
            own process do everything, and nothing can be killed.
        observe: Called with the name of each function that was run and its duration in seconds.
            The name is a label of the metrics, so renaming such a function changes them.
    """

    def __init__(
        self, processes: int, observe: Callable[[str, float], None] = lambda work, duration_s: None
    ) -> None:
        self._observe = observe
        self.num_running = 0
        self._compiler: Compiler | None = None
        self._is_closed = False
        beside = 1 if processes else 0
        self._short = Lane(processes + beside, processes, partial(self._start, NICENESS))
        self._long = Lane(processes, processes, partial(self._start, LONG_NICENESS))

    @property
    def num_waiting(self) -> int:
        """Return the number of calls that wait for a process."""
        return self._short.num_waiting + self._long.num_waiting

    async def search(
        self,
        work: Callable[[float], R],
        deadline_s: float,
        *,
        project: str = "",
        is_final: Callable[[R], bool] = lambda _: True,
        is_patient: bool = False,
    ) -> R:
        """Run a function that is given the seconds it may take; projects take turns.

        Args:
            work: The search; see `run`. It is killed `GRACE_S` after its time is over.
            deadline_s: Time from now to the answer.
            project: Whose turn it takes.
            is_final: Tells whether more time would not improve a result.
            is_patient: Whether waiting for a process takes none of the time.

        Raises:
            DeadlineExceeded: Nothing was found in time, or no process was free.
        """
        ends_s = math.inf if is_patient else time.monotonic() + deadline_s
        best: R | None = None
        try:
            most_s = min(SHORT_S, deadline_s)
            best = await self._search(self._short, project, work, ends_s, most_s)
            if deadline_s <= SHORT_S or is_final(best):
                return best
            return await self._search(self._long, project, work, ends_s, deadline_s)
        except DeadlineExceeded:
            if best is not None:
                return best
            if deadline_s <= SHORT_S or time.monotonic() >= ends_s:
                raise
        return await self._search(self._long, project, work, ends_s, deadline_s)

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in a solver process; function, arguments and result are pickled.

        Cancelling the call kills its process.

        Raises:
            InvalidInput: The work needed more memory than a process has.
            DeadlineExceeded: It took longer than `MAX_WORK_S`, and was killed.
            SolverEnded: The process ended; other calls are unaffected.
        """
        async with self._short.process() as process:
            return await self._call(process, MAX_WORK_S, partial(work, *args, **kwargs))

    async def _search(
        self, lane: Lane, project: str, work: Callable[[float], R], ends_s: float, most_s: float
    ) -> R:
        wait_s = ends_s - time.monotonic()
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(wait_s if math.isfinite(wait_s) else None):
                    process = await stack.enter_async_context(lane.search(project))
            except TimeoutError:
                raise DeadlineExceeded(
                    "the deadline passed before a process was free to search; ask again later, or "
                    "allow more time"
                ) from None
            left_s = max(0.0, min(most_s, ends_s - time.monotonic()))
            return await self._call(process, left_s + GRACE_S, partial(work, left_s))

    async def _call(self, process: SolverProcess | None, timeout_s: float, work: partial[R]) -> R:
        """Run prepared work in a process, or in a thread, and measure it."""
        name = getattr(_innermost(work), "__name__", "other")
        self.num_running += 1
        started = time.perf_counter()
        try:
            with span("stagewright.solve", work=name):
                if process is None:
                    return await run_in_threadpool(work)
                return await process.run(timeout_s, work)
        except MemoryError:
            raise InvalidInput(
                f"planning needs more than the {MAX_BYTES // 2**30} GiB this server gives it; "
                "ask for fewer micro-batches or stages, or plan with the library",
                field="/options",
            ) from None
        finally:
            self._observe(name, time.perf_counter() - started)
            self.num_running -= 1

    def check(self) -> None:
        """Make sure that the next call finds a process; replace one that has ended.

        Raises: SolverEnded.
        """
        try:
            self._short.prepare()
        except OSError as error:
            raise SolverEnded(f"no solver process starts: {error}") from None

    def close(self) -> None:
        """Kill the processes, busy or not; none starts any more."""
        self._is_closed = True
        if self._compiler is not None:
            self._compiler.close()
        # All are killed before any is waited for, so that they end side by side.
        for process in [*self._short.end(), *self._long.end()]:
            process.join()

    def _start(self, niceness: int) -> ProcessPoolExecutor:
        if self._is_closed:
            raise SolverEnded("this server is shutting down; ask again")
        if self._compiler is None:
            self._compiler = Compiler()
        # Spawned: a fork of this process, which has threads, could inherit a lock that is held.
        return ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(os.getpid(), self._compiler.done, niceness),
        )


class Lane:
    """Solver processes of one priority, of which searches may use some; without any, threads."""

    def __init__(
        self, number: int, num_searches: int, start: Callable[[], ProcessPoolExecutor]
    ) -> None:
        self._all = [SolverProcess(start) for _ in range(number)]
        self._idle = list(self._all)
        self._calls = FairTurns(number or MAX_IN_THREADS)
        self._searches = FairTurns(num_searches or MAX_IN_THREADS - 1)

    @property
    def num_waiting(self) -> int:
        return self._calls.num_waiting + self._searches.num_waiting

    @asynccontextmanager
    async def search(self, project: str) -> AsyncIterator[SolverProcess | None]:
        """Wait for a process for a search, in turn with other projects."""
        # Before it waits for a process: so searches leave those that are not for them.
        async with self._searches.place(project), self.process() as process:
            yield process

    @asynccontextmanager
    async def process(self) -> AsyncIterator[SolverProcess | None]:
        """Wait for a process; there is none where threads do the work."""
        async with self._calls.place(""):
            if not self._all:
                yield None
                return
            process = self._idle.pop()
            try:
                yield process
            finally:
                # The next call takes the last: not one that has to start, if it can be helped.
                self._idle.insert(len(self._idle) if process.is_started else 0, process)

    def prepare(self) -> None:
        """Start the process of the next call, if it is not running. Raises: OSError."""
        for process in self._idle[-1:]:
            process.prepare()

    def end(self) -> list[BaseProcess]:
        """Kill all processes; return what the caller may join."""
        return [ended for process in self._all for ended in process.end()]


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

    async def run(self, timeout_s: float, work: Callable[[], R]) -> R:
        """Run a function in the process; cancelling the call kills the process, as time does.

        Raises: DeadlineExceeded, SolverEnded.
        """
        is_new = not self.is_started
        pool = self.prepare()
        running: asyncio.Future[R] | None = None
        try:
            if is_new:  # its start and imports, of a second or two, take none of the time
                await asyncio.wrap_future(pool.submit(callable, _innermost(work)))
            running = asyncio.wrap_future(pool.submit(work))
            # Not cancelled after the time: the pool must not see its own future cancelled while
            # the work runs on.
            if not (await asyncio.wait([running], timeout=timeout_s))[0]:
                raise DeadlineExceeded(
                    f"the work went on after its deadline and was ended after {timeout_s:.3g} s; "
                    "ask for less, or do it with the library"
                )
            return running.result()
        except (asyncio.CancelledError, DeadlineExceeded):
            if running is not None and not running.done():
                # Otherwise asyncio would log that the exception was never retrieved.
                running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                self.end()
            elif running is None:
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


def _innermost(work: Any) -> Any:
    """Return the function below partial ones."""
    return _innermost(work.func) if isinstance(work, partial) else work


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


def _prepare(parent: int, compiled: multiprocessing.synchronize.Event, niceness: int) -> None:
    """Limit this process, tie its life to the server's, and load numba.

    Loading takes a second, once all is compiled. From then on a plan of twenty layers takes 15 ms
    instead of 80, whatever is asked first.
    """
    os.nice(niceness)
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
