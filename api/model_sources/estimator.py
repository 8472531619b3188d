"""Estimating a model in a process of its own, so that torch never enters the server's.

Nothing of the model is run: its operations are applied to tensors that have shapes and no memory.
A process of its own all the same: operators are not safe against every argument.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded
from ...core.requests.requests import Estimated, EstimateRequest
from ..errors import MeasuringUnavailable
from ..sandbox.child import run_confined, run_confined_async
from ..sandbox.limits import ChildLimits, default_memory_bytes
from ..telemetry.tracing import span
from .measure import MeasuringFailed, SandboxChoice, choose_sandbox

if TYPE_CHECKING:
    from ..settings.settings import ServerSettings

MAX_CONCURRENT = 2

DEADLINE_S = 120.0
"""Longest wait for an estimate, waiting for others included."""

MEMORY_BYTES = 8 * 2**30
"""Nothing an estimate looks at has values."""

WITHOUT_TORCH = (
    "estimating needs torch, on the server (install stagewright[torch]) or on a worker that it "
    "reaches; or post a profile instead ('stagewright estimate')"
)

Elsewhere = Callable[[str], Awaitable[str]]
"""Estimates on another machine: an `EstimateRequest` in, an `Estimated` out, as JSON."""


class Estimator:
    """Estimates a few models at a time.

    Args:
        command: The child's program; it reads and writes as `profiler.estimates.child` does.
        deadline_s: Longest wait for an estimate, waiting for others included.
        memory_bytes: Most one child may keep; by default the lesser of `MEMORY_BYTES` and what a
            measuring one may.
        sandbox: Whether children get one.
        elsewhere: Asked where torch is not installed here.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int | None = None,
        sandbox: SandboxChoice = "auto",
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._limits = _limits(memory_bytes, deadline_s + 1.0)  # cancelling ends it before
        self._sandbox = sandbox
        self._elsewhere = elsewhere
        self._turn = asyncio.Semaphore(MAX_CONCURRENT)

    async def estimate(self, request: EstimateRequest) -> Estimated:
        """The profile of a model on devices that need not be here.

        Raises:
            MeasuringUnavailable: torch is not installed here, nor on any worker.
            WorkersUnavailable: The workers, who would do it, cannot be reached.
            InvalidInput, CaptureError, MeasurementError: The child says so.
            OutOfMemory: It took more memory than it may.
            DeadlineExceeded: There was no estimate in time; the child has been killed.
        """
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                with span("stagewright.estimate"):
                    output = await self._output(request.model_dump_json())
        except TimeoutError:
            raise DeadlineExceeded(
                f"there was no estimate after {self._deadline_s:g} s; ask again later, or "
                "estimate where the model is ('stagewright estimate') and post the profile"
            ) from None
        try:
            return Estimated.model_validate_json(output)
        except ValidationError as error:
            raise MeasuringFailed(f"the child's estimate does not fit: {error}") from None

    async def _output(self, request_json: str) -> str | bytes:
        if importlib.util.find_spec("torch") is not None:
            return await run_confined_async(
                self._command,
                request_json.encode(),
                self._limits,
                sandbox=await run_in_threadpool(choose_sandbox, self._sandbox),
            )
        if self._elsewhere is not None:
            return await self._elsewhere(request_json)
        raise MeasuringUnavailable(WITHOUT_TORCH)


def estimate_confined(request_json: str, settings: ServerSettings, stopped: threading.Event) -> str:
    """The answer of a child of this thread's, on a worker; `Estimated` as JSON.

    Raises:
        StagewrightError: See `confined.run.run_confined`.
    """
    output = run_confined(
        settings.estimate_command,
        request_json.encode(),
        _limits(settings.child_memory_bytes, DEADLINE_S),
        sandbox=choose_sandbox(settings.sandbox),
        stopped=stopped,
    )
    return output.decode("utf-8", "replace")


def _limits(memory_bytes: int | None, deadline_s: float) -> ChildLimits:
    return ChildLimits(min(memory_bytes or default_memory_bytes(), MEMORY_BYTES), deadline_s)
