"""Estimates made by workers, where the server has no torch."""

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
    """`models.estimating.Elsewhere`: hands one estimate to a worker, and waits for it.

    It is no job: nothing is written down, and whoever asked waits, as for a child of the server's.

    Args:
        workers: They are elsewhere, and closed by others.
    """

    def __init__(self, workers: WorkerBackend) -> None:
        self._workers = workers
        self._reaching = AsyncWorkers(workers)

    async def __call__(self, request_json: str) -> str:
        """The answer of a worker.

        Raises:
            MeasuringUnavailable: No worker is connected.
            WorkersUnavailable: They cannot be reached, or the one at it was lost.
            MeasuringFailed: A fault of ours, which is in the log.
            StagewrightError: What the child on the worker says.
        """
        needs = await self._kind()
        told: asyncio.Queue[WorkerMessage] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        task = WorkerTask(f"estimate-{secrets.token_hex(8)}", request_json, needs, is_estimate=True)

        def tell(said: WorkerMessage) -> None:
            loop.call_soon_threadsafe(told.put_nowait, said)

        try:
            await self._reaching.submit(task, tell)
            return await _end(told)
        finally:  # also when the deadline, or the end of the server, cancels it
            await asyncio.shield(self._reaching.stop(task.key))

    async def _kind(self) -> str:
        """What to ask of a worker; estimating takes none of it, but every worker offers some."""
        await self._reaching.learn()
        offered = self._reaching.offered()
        if not offered:
            how = self._workers.invitation(CPU)
            raise MeasuringUnavailable(f"{WITHOUT_TORCH}; a worker: {how}")
        return CPU if CPU in offered else offered[0]


async def _end(told: asyncio.Queue[WorkerMessage]) -> str:
    while True:
        said = await told.get()
        match said:
            case ModelEstimated(estimated_json):
                return estimated_json
            case TaskFailed(message=message):
                raise error_from_failure(said) or MeasuringFailed(message)
            case WorkerLost(why):
                raise WorkersUnavailable(f"the worker that estimated was lost ({why}); ask again")
            case ProfileMeasured():
                raise MeasuringFailed("a worker measured what was to be estimated")
            case WorkerStarted() | Heartbeat() | WorkerProgress():
                continue
            case _:
                assert_never(said)
