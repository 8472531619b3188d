"""Pool of solver processes, so that no search slows another request down."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, InvalidInput
from ...core.profile.profile import Profile
from ...planner import numba_cache
from ...schedules import numba_jit as jit
from ..errors import SolverEnded
from ..limits.fair_turns import FairTurns
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
COMPILED_CHECKED_S = 0.5

PROFILES_KEPT = 8
"""Parsed profiles cached in each process. The largest allowed take some hundred MB."""

NICENESS = 5
"""Of solver processes: while searches keep every core busy, the server still answers first."""

LONG_NICENESS = 10
"""Of processes that search for longer than `SHORT_S`: beside a short one they get a quarter."""

COMPILE = (
    sys.executable,
    "-c",
    f"import os; os.nice(14); from {numba_cache.__name__} import compile_all; compile_all()",
)
"""Niced below everything else: plans are found without the kernels, too."""

_log = logging.getLogger(__name__)


class Solver:
    """Executor of CPU-bound work away from the event loop, which ends all of it in time.

    ::

        waits for a short place ──▶ runs ──SHORT_S──▶ runs on in a long place, with less priority
                                                      waits for one, to begin again

    So a search of a moment never waits for a long one, nor for the processors that long ones keep
    busy. Short places are one more than long ones: as many long searches as there is room for may
    begin at once and leave one free. Work that is no search has a process more yet.

    Args:
        processes: Long searches at once; with 0, a few threads of the server's own process do
            everything, and nothing can be killed.
        observe: Called with the name of each function that was run and its duration in seconds.
            The name is a label of the metrics, so renaming such a function changes them.
    """

    def __init__(
        self, processes: int, observe: Callable[[str, float], None] = lambda work, duration_s: None
    ) -> None:
        self._observe = observe
        self.num_running = 0
        number = processes + 2 if processes else 0
        self._idle = [SolverProcess(self._start) for _ in range(number)]
        self._started = set(self._idle)
        self._compiler: Compiler | None = None
        self._is_closed = False
        self._calls = FairTurns(number or MAX_IN_THREADS)
        self._short = FairTurns(number - 1 if number else MAX_IN_THREADS - 1)
        self._long = FairTurns(processes or MAX_IN_THREADS - 1)

    @property
    def num_waiting(self) -> int:
        """Return the number of calls that wait for a place."""
        return sum(turns.num_waiting for turns in (self._calls, self._short, self._long))

    async def search(
        self,
        work: Callable[[float], R],
        deadline_s: float,
        *,
        project: str = "",
        is_patient: bool = False,
    ) -> R:
        """Run a function that is given the seconds it may take; projects take turns.

        Args:
            work: The search; see `run`. It is killed `GRACE_S` after its time is over.
            deadline_s: Time from now to the answer.
            project: Whose turn it takes.
            is_patient: Whether waiting for a place takes none of the time.

        Raises:
            DeadlineExceeded: Nothing was found in time, or no place was free.
            InvalidInput, SolverEnded: See `run`.
        """
        wait_s = math.inf if is_patient else time.monotonic() + deadline_s
        async with AsyncExitStack() as short:
            # First its turn: searches leave a process for other work.
            await _in_time(wait_s, short.enter_async_context(self._short.place(project)))
            process = await _in_time(wait_s, short.enter_async_context(self._process()))
            short.enter_context(self._measured(work))
            if process is None:
                return await run_in_threadpool(work, min(deadline_s, wait_s - time.monotonic()))
            for spare in self._idle[-1:]:  # started beside, for the next call
                spare.warm_up()
            call = await process.begin(work, wait_s, deadline_s)
            if await process.wait(call, min(SHORT_S, call.left_s + GRACE_S)):
                return process.take(call)
            if call.left_s + GRACE_S <= 0:
                process.end()
                raise too_late(deadline_s)
            moved = process.detach()
            self._started.add(moved)
        try:
            is_begun = self._long.has_room
            if not is_begun:
                moved.end()
            async with AsyncExitStack() as long:
                await _in_time(wait_s, long.enter_async_context(self._long.place(project)))
                long.enter_context(self._measured(work))
                if not is_begun:
                    call = await moved.begin(work, wait_s, deadline_s)
                moved.lower_priority()
                if await moved.wait(call, call.left_s + GRACE_S):
                    return moved.take(call)
                raise too_late(deadline_s)
        finally:
            # Not used again: without privileges a priority cannot be raised.
            moved.end()
            self._started.discard(moved)

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in a solver process; function, arguments and result are pickled.

        Cancelling the call kills its process.

        Raises:
            InvalidInput: The work needed more memory than a process has.
            DeadlineExceeded: It took longer than `MAX_WORK_S`, and was killed.
            SolverEnded: The process ended; other calls are unaffected.
        """
        async with self._process() as process:
            with self._measured(work):
                if process is None:
                    return await run_in_threadpool(work, *args, **kwargs)
                prepared = partial(_without_seconds, work, args, kwargs)
                call = await process.begin(prepared, math.inf, MAX_WORK_S)
                if await process.wait(call, call.left_s):
                    return process.take(call)
                process.end()
                raise too_late(MAX_WORK_S)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[SolverProcess | None]:
        """Wait for a process; there is none where threads do the work."""
        async with self._calls.place(""):
            if not self._idle:
                yield None
                return
            process = self._idle.pop()
            try:
                yield process
            finally:
                # The next call takes the last: not one that has to start, if it can be helped.
                self._idle.insert(len(self._idle) if process.is_warm else 0, process)

    @contextmanager
    def _measured(self, work: Callable[..., Any]) -> Iterator[None]:
        name = getattr(function_of(work), "__name__", "other")
        self.num_running += 1
        started = time.perf_counter()
        try:
            with span("stagewright.solve", work=name):
                yield
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
        for ended in [process.end() for process in self._started]:
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


@dataclass(frozen=True)
class Call(Generic[R]):
    """Work that runs in a process, and when its time is over, on the monotonic clock."""

    running: asyncio.Future[R]
    ends_s: float

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()


class SolverProcess:
    """One process that takes one call at a time, started at the first and restarted if it ends.

    A pool of several would be killed as a whole when one of its processes ends, and every other
    search with it.
    """

    def __init__(self, start: Callable[[], ProcessPoolExecutor]) -> None:
        self._start = start
        self._pool: ProcessPoolExecutor | None = None
        self._is_warm = False

    @property
    def is_warm(self) -> bool:
        """Return True if the next call need not wait for the process to start and to import."""
        return self._pool is not None and self._is_warm

    def prepare(self) -> ProcessPoolExecutor:
        """Return the pool for the next call, with a new process if the last one ended.

        Raises: OSError.
        """
        if self._pool is not None and not _is_alive(self._pool):
            self.end()
        if self._pool is None:
            self._pool, self._is_warm = self._start(), False
        return self._pool

    async def begin(self, work: Callable[[float], R], limit_s: float, deadline_s: float) -> Call[R]:
        """Begin a function of the seconds that are left, on the clock, until both limits.

        Raises: SolverEnded.
        """
        began_s, pool = time.monotonic(), self.prepare()
        if not self._is_warm:  # its start and imports, of a second or two, take none of the time
            first = Call(asyncio.wrap_future(pool.submit(callable, function_of(work))), math.inf)
            if await self.wait(first, None):
                self.take(first)
            self._is_warm = True
        now_s = time.monotonic()
        ends_s = min(limit_s + (now_s - began_s), now_s + deadline_s)
        running = asyncio.wrap_future(pool.submit(work, max(0.0, ends_s - now_s)))
        return Call(running, ends_s)

    async def wait(self, call: Call[R], timeout_s: float | None) -> bool:
        """Return whether a call has ended after a timeout; cancelling this kills the process."""
        # Otherwise asyncio would log that the exception of a killed call was never retrieved.
        call.running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            # The pool must not see its own future cancelled while the work runs on.
            return bool((await asyncio.wait([call.running], timeout=timeout_s))[0])
        except asyncio.CancelledError:
            self.end()
            raise

    def take(self, call: Call[R]) -> R:
        """Return the result of a call that has ended. Raises: SolverEnded."""
        try:
            return call.running.result()
        except BrokenProcessPool:
            self.end()
            self.prepare()  # raises the reason, if it was the server's shutdown
            raise SolverEnded(
                "the solver process was killed, most likely for lack of memory; ask for fewer "
                "micro-batches or stages, or ask again later"
            ) from None

    def detach(self) -> SolverProcess:
        """Return the process with its call; this object starts another for the next."""
        detached = SolverProcess(self._start)
        detached._pool, self._pool = self._pool, None
        self.warm_up()
        return detached

    def warm_up(self) -> None:
        """Start the process, unless it is running, without waiting for it."""
        if self._pool is None:
            with suppress(OSError, SolverEnded):  # the next call will say so
                self.prepare().submit(os.getpid)

    def lower_priority(self) -> None:
        """Let other processes go first from now on."""
        for process in self._processes():
            with suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, process.pid or 0, LONG_NICENESS)

    def end(self) -> list[BaseProcess]:
        """Kill the process, busy or not; return what the caller may join."""
        processes = self._processes()
        pool, self._pool = self._pool, None
        # The executor has no public way to kill a process that is busy (Python 3.14 adds one).
        for process in processes:
            with suppress(ProcessLookupError, ValueError):
                process.kill()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        return processes

    def _processes(self) -> list[BaseProcess]:
        return [] if self._pool is None else list((self._pool._processes or {}).values())


async def _in_time(limit_s: float, waited_for: Awaitable[R]) -> R:
    """Return what is waited for, or raise `DeadlineExceeded` at a time on the monotonic clock."""
    left_s = limit_s - time.monotonic()
    try:
        async with asyncio.timeout(None if left_s == math.inf else left_s):
            return await waited_for
    except TimeoutError:
        raise DeadlineExceeded(
            "the deadline passed before it was this request's turn to search; ask again later, or "
            "allow more time"
        ) from None


def too_late(deadline_s: float) -> DeadlineExceeded:
    """Return the error of work that was killed after its deadline."""
    return DeadlineExceeded(
        f"nothing was found within {deadline_s:g} s, and the work was ended; ask for less, allow "
        "more time, or plan with the library"
    )


def function_of(work: Callable[..., Any]) -> Any:
    """Return the function of some work, without prepared arguments."""
    return work.func if isinstance(work, partial) else work


def _without_seconds(work: Callable[..., R], args: Any, kwargs: Any, _: float) -> R:
    return work(*args, **kwargs)


class Compiler:
    """Process that compiles the kernels, if that is still to be done.

    It takes half a minute; then ``done``, which spawned processes share, is 1, whether it
    succeeded or not. Small problems are planned in plain Python until then.
    """

    def __init__(self) -> None:
        # Shared memory without a lock: one that a killed process held would stop all others.
        self.done = multiprocessing.get_context("spawn").RawValue("b", 0)
        self._process: subprocess.Popen[bytes] | None = None
        if numba_cache.is_done():
            self.done.value = 1
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
        self.done.value = 1


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


def _prepare(parent: int, compiled: ctypes.c_byte) -> None:
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
        while not compiled.value:
            time.sleep(COMPILED_CHECKED_S)
        jit.load_if_worthwhile(jit.LARGE_STEPS)

    threading.Thread(target=watch, daemon=True).start()
    if compiled.value:
        load()
    else:
        threading.Thread(target=load, daemon=True).start()
