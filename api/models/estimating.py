"""Estimating a model in a process of its own, so that torch never enters the server's.

Nothing of the model is run: its operations are applied to tensors that have shapes and no memory.
A process of its own all the same: operators are not safe against every argument.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded
from ...core.options import Estimated, EstimateRequest
from ..confined.limits import Limits, default_memory_bytes
from ..confined.measure import MeasuringFailed, SandboxChoice, chosen_sandbox
from ..confined.run import run_confined_async
from ..measuring import MeasuringUnavailable
from ..telemetry.tracing import span

MAX_CONCURRENT = 2

MEMORY_BYTES = 8 * 2**30
"""Nothing an estimate looks at has values."""


class Estimator:
    """Estimates a few models at a time.

    Args:
        command: The child's program; it reads and writes as `profiler.estimates.child` does.
        deadline_s: Longest wait for an estimate, waiting for others included.
        memory_bytes: Most one child may keep; by default the lesser of `MEMORY_BYTES` and what a
            measuring one may.
        sandbox: Whether children get one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        deadline_s: float = 120.0,
        memory_bytes: int | None = None,
        sandbox: SandboxChoice = "auto",
    ) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        memory_bytes = min(memory_bytes or default_memory_bytes(), MEMORY_BYTES)
        self._limits = Limits(memory_bytes, deadline_s + 1.0)  # cancelling ends it before
        self._sandbox = sandbox
        self._turn = asyncio.Semaphore(MAX_CONCURRENT)

    async def estimate(self, request: EstimateRequest) -> Estimated:
        """The profile of a model on devices that need not be here.

        Raises:
            MeasuringUnavailable: torch is not installed here.
            InvalidInput, CaptureError, MeasurementError: The child says so.
            OutOfMemory: It took more memory than it may.
            DeadlineExceeded: There was no estimate in time; the child has been killed.
        """
        if importlib.util.find_spec("torch") is None:
            raise MeasuringUnavailable(
                "estimating needs torch on the server; measure with 'profiling', which workers "
                "do, post a profile instead ('stagewright estimate'), or install "
                "stagewright[torch]"
            )
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                with span("stagewright.estimate"):
                    output = await run_confined_async(
                        self._command,
                        request.model_dump_json().encode(),
                        self._limits,
                        sandbox=await run_in_threadpool(chosen_sandbox, self._sandbox),
                    )
        except TimeoutError:
            raise DeadlineExceeded(
                f"there was no estimate after {self._deadline_s:g} s; ask again later, or "
                "estimate where the model is ('stagewright estimate') and post the profile"
            ) from None
        try:
            return Estimated.model_validate_json(output)
        except ValidationError as error:
            raise MeasuringFailed(f"the child's estimate does not fit: {error}") from None
