"""Estimating a model in a process of its own, so that torch never enters the server's.

Nothing of the model is run: its operations are applied to tensors that have shapes and no memory.
A process of its own all the same: operators are not safe against every argument.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

from pydantic import ValidationError

from ...core.errors import DeadlineExceeded
from ...core.options import Estimated, EstimateRequest
from ..measuring import MeasuringFailed, MeasuringUnavailable, answer_of

MAX_CONCURRENT = 2


class Estimator:
    """Estimates a few models at a time.

    Args:
        command: The child's program; it reads and writes as `profiler.estimates.child` does.
        deadline_s: Longest wait for an estimate, waiting for others included.
    """

    def __init__(self, command: Sequence[str], *, deadline_s: float = 120.0) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._turn = asyncio.Semaphore(MAX_CONCURRENT)

    async def estimate(self, request: EstimateRequest) -> Estimated:
        """The profile of a model on devices that need not be here.

        Raises:
            MeasuringUnavailable: torch is not installed here.
            InvalidInput, CaptureError, MeasurementError: The child says so.
            DeadlineExceeded: There was no estimate in time; the child has been killed.
        """
        if importlib.util.find_spec("torch") is None:
            raise MeasuringUnavailable(
                "estimating needs torch on the server; post a profile instead, "
                "or install stagewright[torch]"
            )
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                output = await answer_of(self._command, request.model_dump_json().encode())
        except TimeoutError:
            raise DeadlineExceeded(
                f"there was no estimate after {self._deadline_s:g} s; ask again later, or "
                "estimate where the model is ('stagewright estimate') and post the profile"
            ) from None
        try:
            return Estimated.model_validate_json(output)
        except ValidationError as error:
            raise MeasuringFailed(f"the child's estimate does not fit: {error}") from None
