"""Estimates of a model in a child process, so that the server never imports torch.

The model is not executed: its operators run on meta tensors, which have shapes but no data. The
child is confined nevertheless, because operators are not safe against arbitrary arguments.
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
from ..fair_limits import FairTurns
from ..sandbox.child import run_confined, run_confined_async
from ..sandbox.limits import ChildLimits, default_memory_bytes
from ..telemetry.tracing import span
from .measure import SandboxChoice, choose_sandbox, invalid_answer

if TYPE_CHECKING:
    from ..settings.settings import ServerSettings

MAX_CONCURRENT, MAX_OF_PROJECT = 3, 2
"""Estimates at a time: one place is left for the others of each project."""

DEADLINE_S = 120.0
"""Time limit of an estimate, including the wait for earlier ones."""

MEMORY_BYTES = 8 * 2**30
"""Enough, since meta tensors have no data."""

WITHOUT_TORCH = (
    "estimating needs torch, on the server (install stagewright[torch]) or on a connected worker; "
    "or post a profile instead ('stagewright estimate')"
)

RemoteEstimator = Callable[[str], Awaitable[str]]
"""Estimates on another machine: takes an `EstimateRequest`, returns an `Estimated`, as JSON."""


class Estimator:
    """Estimator of models, `MAX_CONCURRENT` at a time, ``elsewhere`` if torch is not installed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int | None = None,
        sandbox: SandboxChoice = "auto",
        elsewhere: RemoteEstimator | None = None,
    ) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._limits = _limits(memory_bytes, deadline_s + 1.0)  # the timeout here comes first
        self._sandbox = sandbox
        self._elsewhere = elsewhere
        self._turns = FairTurns(MAX_CONCURRENT, MAX_OF_PROJECT)

    async def estimate(
        self, request: EstimateRequest, project: str = "", deadline_s: float | None = None
    ) -> Estimated:
        """Return the estimated profile of a model on the requested devices.

        Args:
            request: The model and the devices.
            project: Whose turn it takes.
            deadline_s: Time from now to the answer, if that is less than every estimate has.

        Raises:
            MeasuringUnavailable: torch is installed neither here nor on a worker.
            WorkersUnavailable: The workers cannot be reached.
            InvalidInput, CaptureError, MeasurementError: Reported by the child.
            OutOfMemory: The child exceeded its memory limit.
            DeadlineExceeded: The estimate took too long; the child has been killed.
        """
        limit_s = min(self._deadline_s, deadline_s or self._deadline_s)
        try:
            # The timeout is the outer one: waiting for a turn counts, too.
            async with asyncio.timeout(limit_s), self._turns.place(project):
                with span("stagewright.estimate"):
                    output = await self._output(request.model_dump_json())
        except TimeoutError:
            raise DeadlineExceeded(
                f"no estimate within {limit_s:g} s; allow more time if the request sets a "
                "deadline, ask again later, or estimate where the model is ('stagewright "
                "estimate') and post the profile"
            ) from None
        try:
            return Estimated.model_validate_json(output)
        except ValidationError as error:
            raise invalid_answer("estimate", error) from None

    async def _output(self, request_json: str) -> str | bytes:
        # Looked up, not imported: torch is for the child.
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
    """Estimate in a child of this thread, on a worker; return an `Estimated` as JSON."""
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
