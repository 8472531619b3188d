"""Pool of solver processes, so that no search slows another request down."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, InvalidInput
from ..errors import SolverEnded, TooManyWaiting
from ..fair_limits import FairTurns
from ..telemetry.tracing import span
from .kernel_compiler import KernelCompiler
from .progress import SearchProgress
from .solver_process import MAX_BYTES, BestPlan, Call, SolverProcess, start_executor, too_late

R = TypeVar("R")

SHORT_S = 0.5
"""Longest short search, as most plans take less. Sizes do not tell beforehand: 100 layers over 8
devices took 0.03 s of processor time, many times that with recomputation and replicas."""

GRACE_S = 1.5
"""Time that a search has to return its best plan after its deadline, before it is killed."""

MAX_WORK_S = 60.0
"""Longest work that is no search, such as drawing a timeline of 32,768 actions, and the longest
wait for its turn."""

MAX_IN_THREADS = 2
"""Calls at a time without processes; more threads would only slow each other down."""

MAX_ASKED = 18
"""Calls of one project for work that is no search, waiting or running; each holds its document."""

CHECKED_S = 0.1
"""Interval at which a search beyond `SHORT_S` looks whether it has to make room."""

NUM_SPARES = 2
"""Idle processes kept ready: two searches that begin together then wait for none to start."""


class Solver:
    """Executor of CPU-bound work away from the event loop, which ends all of it in time.

    ::

        waits for a short place ──▶ runs ──SHORT_S──▶ runs on in a long place, with less priority
                                                      runs on in its own, while none is free
                                                      waits for a long one, to begin again, once
                                                      another search waits for its short one

    So a search of a moment never waits for a long one, nor for the processors that long ones keep
    busy. Short places are one more than long ones: as many long searches as there is room for may
    begin at once and leave one free. One process is left for work that is no search, and one for
    searches, however much there is of the other.

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
        self._compiler: KernelCompiler | None = None
        self._is_closed = False
        num_calls = number or MAX_IN_THREADS
        self._calls = FairTurns(num_calls)
        self._short = FairTurns(num_calls - 1)
        self._long = FairTurns(processes or num_calls - 1)
        self._other = FairTurns(num_calls - 1, max(1, num_calls - 2))
        self._begun: set[asyncio.Task[Any]] = set()
        self._asked: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Return the number of calls that wait for a place."""
        turns = (self._calls, self._short, self._long, self._other)
        return sum(each.num_waiting for each in turns)

    async def search(
        self,
        work: Callable[[float], R],
        deadline_s: float,
        *,
        project: str = "",
        is_patient: bool = False,
        progress: SearchProgress | None = None,
        read_kept: Callable[[bytes], R] | None = None,
    ) -> R:
        """Run a function that is given the seconds it may take; projects take turns.

        Args:
            work: The search; see `run`. It is killed `GRACE_S` after its time is over.
            deadline_s: Time from now to the answer.
            project: Whose turn it takes.
            is_patient: Whether waiting for a place takes none of the time.
            progress: Shows what the search has found, from its beginning on.
            read_kept: Reads the best answer that the search has left by `report_best`, which is
                returned if it is killed.

        Raises:
            DeadlineExceeded: Nothing was found in time, or no place was free.
            InvalidInput, SolverEnded: See `run`.
        """
        until_s = math.inf if is_patient else time.monotonic() + deadline_s
        attempts_s: list[float] = []
        kept = Path(gettempdir(), f"stagewright-{token_hex(16)}.json")
        try:
            return await self._search(
                work, until_s, deadline_s, project, attempts_s, progress, kept
            )
        except (DeadlineExceeded, SolverEnded, InvalidInput):  # the last for lack of memory
            if read_kept is None or not kept.exists():
                raise
            return await run_in_threadpool(lambda: read_kept(kept.read_bytes()))
        finally:
            for file in (kept, kept.with_suffix(".partial")):
                file.unlink(missing_ok=True)
            if attempts_s:
                self._observe(name_of(work), sum(attempts_s))

    async def _search(
        self,
        work: Callable[[float], R],
        until_s: float,
        deadline_s: float,
        project: str,
        attempts_s: list[float],
        progress: SearchProgress | None,
        kept: Path,
    ) -> R:
        """Search in a short place, and then in a long one; ``until_s`` is a time on the clock."""
        async with AsyncExitStack() as short:
            # First its turn: searches leave a process for other work.
            await short.enter_async_context(self._short.place(project, until_s))
            process = await short.enter_async_context(self._process(work, project, until_s))
            short.enter_context(self._running(work, attempts_s))
            if process is None:
                return await run_in_threadpool(work, min(deadline_s, until_s - time.monotonic()))
            self.warm_up(work)
            process.best[:] = [math.inf, 0.0]
            call = await process.begin(work, until_s, deadline_s, kept=kept)
            if progress is not None:  # the memory stays the same in a long place
                progress.best = process.best
            if await self._wait_in_short_place(process, call):
                return process.take(call)
            if call.left_s + GRACE_S <= 0:
                process.end()
                raise too_late(deadline_s)
            moved = process.detach()
            self._started.add(moved)
            self.warm_up(work)
        try:
            is_begun = self._long.has_room
            if not is_begun:
                moved.end()
            async with AsyncExitStack() as long:
                await long.enter_async_context(self._long.place(project, until_s))
                long.enter_context(self._running(work, attempts_s))
                if not is_begun:
                    call = await moved.begin(work, until_s, deadline_s, kept=kept)
                moved.lower_priority()
                if await moved.wait(call, call.left_s + GRACE_S):
                    return moved.take(call)
                raise too_late(deadline_s)
        finally:
            # Not used again: without privileges a priority cannot be raised.
            moved.end()
            self._started.discard(moved)

    async def _wait_in_short_place(self, process: SolverProcess, call: Call[Any]) -> bool:
        """Wait as long as a search may keep its short place; return whether it has ended."""
        # Without a long place it would be killed, to begin again: not for its last seconds, and
        # not before another search needs the place.
        if call.left_s <= SHORT_S + GRACE_S:
            return await process.wait(call, call.left_s + GRACE_S)
        is_over = await process.wait(call, SHORT_S)
        while not (is_over or self._long.has_room or self._short.num_waiting):
            if call.left_s + GRACE_S <= 0:
                break
            is_over = await process.wait(call, CHECKED_S)
        return is_over

    async def run(self, work: Callable[[], R], *, project: str = "") -> R:
        """Run a function in a solver process; function, arguments and result are pickled.

        Projects take turns, and leave one place to the others. A call that is cancelled gives up
        its turn; one that runs goes on, as another process would have to start in its place.

        Args:
            work: A function of a module, or a `functools.partial` of one.
            project: Whose turn it takes.

        Raises:
            InvalidInput: The work needed more memory than a process has.
            DeadlineExceeded: It took longer than `MAX_WORK_S`, and was killed, or waited as long.
            SolverEnded: The process ended, and so did the fresh one that was asked again; other
                calls are unaffected.
            TooManyWaiting: The project has `MAX_ASKED` calls waiting or running.
        """
        if self._asked[project] >= MAX_ASKED:
            raise TooManyWaiting(MAX_ASKED)
        self._asked[project] += 1
        call = asyncio.create_task(self._run(work, project))

        def forget(ended: asyncio.Task[R]) -> None:
            self._asked -= Counter([project])
            ended.cancelled() or ended.exception()  # nobody may be there to retrieve it

        call.add_done_callback(forget)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call not in self._begun:
                call.cancel()
            raise

    async def _run(self, work: Callable[[], R], project: str) -> R:
        until_s = time.monotonic() + MAX_WORK_S
        attempts_s: list[float] = []
        try:
            async with AsyncExitStack() as stack:
                # First its turn: other work leaves a process for searches.
                await stack.enter_async_context(self._other.place(project, until_s))
                process = await stack.enter_async_context(self._process(work, project, until_s))
                stack.enter_context(self._running(work, attempts_s))
                self._begun.add(task := _this_task())
                stack.callback(self._begun.discard, task)
                if process is None:
                    return await run_in_threadpool(work)
                try:
                    return await _run_in(process, work)
                except SolverEnded:  # which may have been another request's doing
                    return await _run_in(process, work)
        finally:
            if attempts_s:
                self._observe(name_of(work), sum(attempts_s))

    @asynccontextmanager
    async def _process(
        self, work: Callable[..., Any], project: str, until_s: float
    ) -> AsyncIterator[SolverProcess | None]:
        """Wait for a process; there is none where threads do the work."""
        async with self._calls.place(project, until_s):
            if not self._idle:
                yield None
                return
            # One that is ready, else one that is starting; of these the last one used.
            function = function_of(work)
            process = max(
                reversed(self._idle), key=lambda idle: (idle.is_warm(function), idle.is_started)
            )
            self._idle.remove(process)
            try:
                yield process
            finally:
                self._idle.append(process)

    def warm_up(self, work: Callable[..., Any]) -> None:
        """Start idle processes and import what they will run, for the next calls."""
        for spare in self._idle[-NUM_SPARES:]:
            with suppress(OSError, SolverEnded):  # the next call will say so
                spare.warm_up(function_of(work))

    @contextmanager
    def _running(self, work: Callable[..., Any], attempts_s: list[float]) -> Iterator[None]:
        """Count a call as running, and append the seconds that it ran for."""
        self.num_running += 1
        started = time.perf_counter()
        try:
            with span("stagewright.solve", work=name_of(work)):
                yield
        except MemoryError:
            raise InvalidInput(
                f"planning needs more than the {MAX_BYTES // 2**30} GiB this server gives it; "
                "ask for fewer micro-batches or stages, or plan with the library",
                field="/options",
            ) from None
        finally:
            attempts_s.append(time.perf_counter() - started)
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

    def _start(self, best: BestPlan) -> ProcessPoolExecutor:
        if self._is_closed:
            raise SolverEnded("this server is shutting down; ask again")
        if self._compiler is None:
            self._compiler = KernelCompiler()
        return start_executor(self._compiler.done, best)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    return task


async def _run_in(process: SolverProcess, work: Callable[[], R]) -> R:
    call = await process.begin(work, math.inf, MAX_WORK_S, is_timed=False)
    if await process.wait(call, call.left_s):
        return process.take(call)
    process.end()
    raise too_late(MAX_WORK_S)


def name_of(work: Callable[..., Any]) -> str:
    """Return the name of a function, which is a label of the metrics."""
    return getattr(function_of(work), "__name__", "other")


def function_of(work: Callable[..., Any]) -> Any:
    """Return the function of some work, without prepared arguments."""
    return work.func if isinstance(work, partial) else work
