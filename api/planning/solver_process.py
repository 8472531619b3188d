"""One process that plans: its start, its limits, its calls, and its end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import resolve_name
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...core.errors import DeadlineExceeded, ForeignError, StagewrightError
from ...core.process_exit import count_memory_kills, describe_exit
from ...core.profile.profile import Profile
from ...planner import numba_cache
from ...schedules import numba_jit as jit
from ..errors import SolverEnded

if TYPE_CHECKING:
    from ...planner.problem.problem import Progress

R = TypeVar("R")

_log = logging.getLogger(__name__)

BestPlan = ctypes.Array[ctypes.c_double]
"""Value and lower bound, in memory that a solver process shares with the server."""

MAX_BYTES = 8 * 2**30
"""Address space of one process. The largest request allowed needed 0.7 GB (see `admission`);
numpy and numba map several more that they never touch."""

COMPILED_CHECKED_S = 0.5

JOINED_S = 1.0
"""Longest wait for the exit code of a process that has ended, which takes a few milliseconds."""

PROFILES_KEPT = 8
"""Parsed profiles cached in each process. The largest allowed take some hundred MB."""

PRELOADED = (".solver_template", "..page.plan_views")
"""Modules of what runs here, from this package; imported once, for all processes."""

GARBAGE_AFTER = 100_000
"""Allocations between garbage collections: reading 10,000 layers takes 0.2 s, and by Python's
default 0.6 s."""

NICENESS = 5
"""Of solver processes: while searches keep every core busy, the server still answers first."""

LONG_NICENESS = 19
"""Of processes with a long search: beside short ones, which end soon, they get next to nothing."""


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

    Args:
        start: Returns an executor with one process, given the memory in which that process reports
            its best plan; see `start_executor`.

    Attributes:
        best: Value of the best plan that the call has found, infinite at first, and a lower bound.
    """

    def __init__(self, start: Callable[[BestPlan], ProcessPoolExecutor]) -> None:
        self._start = start
        self.best = multiprocessing.get_context("forkserver").RawArray("d", (math.inf, 0.0))
        self._pool: ProcessPoolExecutor | None = None
        self._kills_before = 0
        self._imported: dict[Callable[..., Any], Future[bool]] = {}

    @property
    def is_started(self) -> bool:
        """Return True if the process is there, whether or not it has imported anything yet."""
        return self._pool is not None

    def is_warm(self, function: Callable[..., Any]) -> bool:
        """Return True if the process has started and has imported a function's module."""
        imported = self._imported.get(function)
        return imported is not None and imported.done() and imported.exception() is None

    def prepare(self) -> ProcessPoolExecutor:
        """Return the executor for the next call, with a new process if the last one ended.

        Raises: OSError.
        """
        if self._pool is not None and not _is_alive(self._pool):
            self.end()
        if self._pool is None:
            self._pool, self._kills_before = self._start(self.best), count_memory_kills()
        return self._pool

    def warm_up(self, function: Callable[..., Any]) -> Future[bool]:
        """Start the process and import a function's module there, without waiting for it.

        Raises: OSError.
        """
        pool = self.prepare()
        imported = self._imported.get(function)
        if imported is None or (imported.done() and not self.is_warm(function)):
            # To unpickle a function is to import its module.
            imported = self._imported[function] = pool.submit(callable, function)
        return imported

    async def begin(
        self,
        work: Callable[..., R],
        until_s: float,
        deadline_s: float,
        *,
        is_timed: bool = True,
        kept: Path | None = None,
    ) -> Call[R]:
        """Begin a function, once the process has started and has imported it.

        Args:
            work: The function, or a `functools.partial` of one.
            until_s: When its time is over, on the monotonic clock.
            deadline_s: The longest time it may take, from its beginning.
            is_timed: Whether the function is given the seconds that it may take.
            kept: File for the best answer so far, by `report_best`.

        Raises:
            DeadlineExceeded: The process took all of the time to start; it goes on starting.
            SolverEnded: It ended.
        """
        function: Any = work.func if isinstance(work, partial) else work
        imported = self.warm_up(function)
        if not self.is_warm(function):
            warming = Call(asyncio.wrap_future(imported), until_s)
            if not await self.wait(warming, None if until_s == math.inf else warming.left_s):
                raise too_late(deadline_s)
            self.take(warming)
        now_s = time.monotonic()
        ends_s = min(until_s, now_s + deadline_s)
        given = [max(0.0, ends_s - now_s)] if is_timed else []
        running = self.prepare().submit(carry_out, work, kept, *given)
        return Call(asyncio.wrap_future(running), ends_s)

    async def wait(self, call: Call[R], timeout_s: float | None) -> bool:
        """Return whether a call has ended after a timeout; cancelling this kills the process."""
        # Otherwise asyncio would log that the exception of a killed call was never retrieved.
        call.running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            # The executor must not see its own future cancelled while the work runs on.
            return bool((await asyncio.wait([call.running], timeout=timeout_s))[0])
        except asyncio.CancelledError:
            self.end()
            raise

    def take(self, call: Call[R]) -> R:
        """Return the result of a call that has ended. Raises: SolverEnded."""
        try:
            return call.running.result()
        except BrokenProcessPool as error:
            if error.__cause__ is not None:  # the executor could not read the answer
                _log.error("a solver process was given up", exc_info=error)
            how = self._describe_end()
            self.end()
            self.prepare()  # raises the reason, if it was the server's shutdown
            raise SolverEnded(
                f"the solver process {how}; ask for fewer micro-batches or stages, or ask again "
                "later"
            ) from None

    def _describe_end(self) -> str:
        # The executor's thread reads the exit code, which can be read only once.
        reader: Any = self._pool and self._pool._executor_manager_thread
        if reader is not None:
            reader.join(JOINED_S)
        codes = [process.exitcode for process in self._processes()]
        return describe_exit(codes[0] or 0, self._kills_before) if codes else "ended"

    def detach(self) -> SolverProcess:
        """Return the process with its call, as an object of its own; this one has none then."""
        detached = SolverProcess(self._start)
        detached._pool, self._pool = self._pool, None
        detached._kills_before = self._kills_before
        detached.best, self.best = self.best, detached.best
        detached._imported, self._imported = self._imported, {}
        return detached

    def lower_priority(self) -> None:
        """Let other processes go first from now on."""
        for process in self._processes():
            with suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, process.pid or 0, LONG_NICENESS)

    def end(self) -> list[BaseProcess]:
        """Kill the process, busy or not; return what the caller may join."""
        processes = self._processes()
        pool, self._pool, self._imported = self._pool, None, {}
        # The executor has no public way to kill a process that is busy (Python 3.14 adds one).
        for process in processes:
            with suppress(ProcessLookupError, ValueError):
                process.kill()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        return processes

    def _processes(self) -> list[BaseProcess]:
        return [] if self._pool is None else list((self._pool._processes or {}).values())


def start_executor(compiled: ctypes.c_byte, best: BestPlan) -> ProcessPoolExecutor:
    """Start an executor with one process, which uses the kernels once ``compiled`` is 1.

    Searches in it report their ``best`` plan.
    """
    # Forked from a process without threads: a fork of this one could inherit a lock that is held.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([resolve_name(name, __package__) for name in PRELOADED])
    return ProcessPoolExecutor(1, context, initializer=_prepare, initargs=(compiled, best))


def carry_out(work: Callable[..., R], kept: Path | None, *given: float) -> R:
    """Call a function in a solver process; whatever it raises arrives at the server.

    An exception that the server cannot unpickle would end the process. The file ``kept`` is for the
    best answer so far.
    """
    _shared().kept = kept
    try:
        return work(*given)
    except (StagewrightError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (raised by the server)
        raise ForeignError.of(error) from None


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


def _prepare(compiled: ctypes.c_byte, best: BestPlan) -> None:
    """Limit this process, tie its life to the server's, and see to it that the kernels are loaded.

    With them a plan of twenty layers takes 15 ms instead of 80.
    """
    os.nice(NICENESS)
    gc.freeze()  # a collection would look through, and so copy, what the processes share
    gc.set_threshold(GARBAGE_AFTER)
    _shared().best = best
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which drains first
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    server = multiprocessing.parent_process()
    assert server is not None, "a solver process has a server"

    def watch() -> None:
        # A server killed by SIGKILL ends no children.
        server.join()
        os._exit(1)

    def load() -> None:
        while not compiled.value:
            time.sleep(COMPILED_CHECKED_S)
        jit.resume()
        numba_cache.load_common()

    threading.Thread(target=watch, daemon=True).start()
    if compiled.value:
        load()
    else:
        # A search that compiled for itself would take twenty seconds for that, and be killed.
        jit.postpone()
        threading.Thread(target=load, daemon=True).start()


@dataclass
class _Shared:
    """Values that this process shares with the server; empty in the server itself."""

    best: BestPlan | None = None
    kept: Path | None = None


@cache
def _shared() -> _Shared:
    return _Shared()


def report_best(found: Progress, answer: Callable[[], str] | None = None) -> None:
    """Tell the server the best plan so far, if this is a solver process.

    The ``answer`` with that plan is left in a file, whole at any moment: the process may be killed.
    """
    best, kept = _shared().best, _shared().kept
    if best is None:
        return
    if kept is not None and answer is not None and found.value < best[0]:
        text, partial_file = answer(), kept.with_suffix(".partial")
        with suppress(OSError):  # a full disk ends no search
            partial_file.touch(0o600)
            partial_file.write_text(text, encoding="utf-8")
            partial_file.replace(kept)
    best[:] = [min(found.value, best[0]), max(found.lower_bound, best[1])]


def too_late(deadline_s: float) -> DeadlineExceeded:
    """Return the error of work that was killed after its deadline."""
    return DeadlineExceeded(
        f"nothing was found within {deadline_s:g} s, and the work was ended; ask for less, allow "
        "more time, or plan with the library"
    )
