"""Asynchronous access to a worker backend, and estimates made by its workers.

An unreachable scheduler blocks its caller for seconds; requests in the server's thread pool must
not wait behind it, so the backend has a few threads of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar, assert_never

from ...core.errors import MeasurementError
from ..errors import MeasuringUnavailable, WorkersUnavailable
from ..model_sources.estimator import WITHOUT_TORCH
from .messages import (
    CPU,
    Heartbeat,
    ModelEstimated,
    ProfileMeasured,
    TaskFailed,
    WorkerLost,
    WorkerMessage,
    WorkerProgress,
    WorkerStarted,
    WorkerTask,
)
from .outcome import error_from_failure
from .workers import WorkerBackend

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 4

RECONNECT_S = 2.0
"""Pause before unreachable workers are tried again."""


class AsyncWorkers:
    """A `WorkerBackend` without blocking; belongs to one event loop.

    ``trouble`` says why the workers cannot be reached; `None` if they can.
    """

    def __init__(self, workers: WorkerBackend) -> None:
        self.trouble: str | None = None
        self._workers = workers
        self._offers: Mapping[str, int] | None = None
        self._threads = ThreadPoolExecutor(THREADS, "workers")
        self._refreshing = asyncio.Lock()

    async def until_reached(self, needs: str | None) -> None:
        """Wait until the workers can be reached; learn their offers if ``needs`` is unknown."""
        while not self.has(needs) or self.trouble is not None:
            async with self._refreshing:  # one waiting job asks on behalf of all
                if self.trouble is None and self.has(needs):
                    return
                await self._refresh()
                if self.trouble is None:
                    return
                await asyncio.sleep(RECONNECT_S)

    async def refresh(self, *, skip_if_busy: bool = False) -> None:
        """Ask what is offered now."""
        if not (skip_if_busy and self._refreshing.locked()):
            async with self._refreshing:
                await self._refresh()

    async def _refresh(self) -> None:
        try:
            self._offers = await self._call(self._workers.offers)
            self.trouble = None
        except WorkersUnavailable as error:
            self.trouble = str(error)

    def has(self, needs: str | None) -> bool:
        """Return True if some worker is known to offer a resource."""
        return bool(self._offers and self._offers.get(needs or ""))

    def count(self, needs: str | None) -> int:
        """Return the number of workers known to offer a resource."""
        return (self._offers or {}).get(needs or "", 0)

    def offered(self) -> tuple[str, ...]:
        """Return the resources known to be offered. Raises: WorkersUnavailable."""
        if self.trouble is not None:
            raise WorkersUnavailable(self.trouble)
        return tuple(kind for kind, number in (self._offers or {}).items() if number)

    def message(self, needs: str) -> str | None:
        """Return why a job with these needs cannot run now and what would help, if so."""
        if self.trouble is not None or self._offers is None or self.has(needs):
            return self.trouble
        return f"no worker offers {needs}; {self._workers.invitation(needs)}"

    async def submit(self, task: WorkerTask, on_message: Callable[[WorkerMessage], None]) -> None:
        """Queue a task; see `WorkerBackend.submit`."""
        try:
            await self._call(self._workers.submit, task, on_message)
        except WorkersUnavailable as error:
            self.trouble = str(error)
            raise

    async def stop(self, key: str) -> None:
        """End a task; see `WorkerBackend.stop`."""
        await self._call(self._workers.stop, key)

    async def close(self) -> None:
        """Close the backend; see `WorkerBackend.close`."""
        # Not in this object's threads, which may all be waiting for a connection.
        await asyncio.to_thread(self._workers.close)
        self._threads.shutdown(wait=False)

    async def _call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: call(*args, **kwargs)
        )


class EstimatingWorkers:
    """A `model_sources.estimator.RemoteEstimator`: sends each estimate to a worker.

    An estimate is no job: nothing is stored, and the request waits for it.
    """

    def __init__(self, workers: WorkerBackend) -> None:
        self._workers = workers
        self._async_workers = AsyncWorkers(workers)

    async def __call__(self, request_json: str) -> str:
        """Return a worker's answer to an `EstimateRequest`, both as JSON.

        Raises: MeasuringUnavailable, WorkersUnavailable, StagewrightError.
        """
        needs = await self._choose_resource()
        inbox: asyncio.Queue[WorkerMessage] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        task = WorkerTask(f"estimate-{secrets.token_hex(8)}", request_json, needs, is_estimate=True)

        def on_message(message: WorkerMessage) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, message)

        try:
            await self._async_workers.submit(task, on_message)
            return await _wait_for_estimate(inbox)
        finally:  # also if the deadline or the server's shutdown cancels this
            await asyncio.shield(self._async_workers.stop(task.key))

    async def _choose_resource(self) -> str:
        """Return a resource to ask for: estimating needs none, but tasks must name one."""
        await self._async_workers.refresh()
        offered = self._async_workers.offered()
        if not offered:
            how = self._workers.invitation(CPU)
            raise MeasuringUnavailable(f"{WITHOUT_TORCH}; start a worker with: {how}")
        return CPU if CPU in offered else offered[0]


async def _wait_for_estimate(inbox: asyncio.Queue[WorkerMessage]) -> str:
    while True:
        message = await inbox.get()
        match message:
            case ModelEstimated(estimated_json):
                return estimated_json
            case TaskFailed():
                raise error_from_failure(message)
            case WorkerLost(why):
                raise WorkersUnavailable(f"the worker making the estimate was lost ({why}); retry")
            case ProfileMeasured():
                raise MeasurementError("a worker measured instead of estimating")
            case WorkerStarted() | Heartbeat() | WorkerProgress():
                continue
            case _:
                assert_never(message)
