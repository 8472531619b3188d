"""Estimates made by workers, for servers without torch."""

from __future__ import annotations

import asyncio
import secrets
from typing import assert_never

from ..errors import MeasuringUnavailable, WorkersUnavailable
from ..model_sources.estimator import WITHOUT_TORCH
from ..model_sources.measure import MeasuringFailed
from .async_workers import AsyncWorkers
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


class EstimatingWorkers:
    """A `model_sources.estimator.RemoteEstimator`: sends each estimate to a worker.

    An estimate is no job: nothing is stored, and the request waits for it.

    Args:
        workers: A remote backend, closed by its owner.
    """

    def __init__(self, workers: WorkerBackend) -> None:
        self._workers = workers
        self._async_workers = AsyncWorkers(workers)

    async def __call__(self, request_json: str) -> str:
        """Return a worker's answer to an `EstimateRequest`, both as JSON.

        Raises:
            MeasuringUnavailable: No worker is connected.
            WorkersUnavailable: The workers cannot be reached, or the one at work was lost.
            MeasuringFailed: An internal error, which is in the log.
            StagewrightError: The worker's child reports it.
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
            case TaskFailed(message=text):
                raise error_from_failure(message) or MeasuringFailed(text)
            case WorkerLost(why):
                raise WorkersUnavailable(f"the worker making the estimate was lost ({why}); retry")
            case ProfileMeasured():
                raise MeasuringFailed("a worker measured instead of estimating")
            case WorkerStarted() | Heartbeat() | WorkerProgress():
                continue
            case _:
                assert_never(message)
