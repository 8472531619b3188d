"""What a rank that failed writes down, and the error its launcher makes of that."""

from __future__ import annotations

import traceback

from pydantic import BaseModel, ConfigDict

from ...core import errors
from ...profiler.machine.out_of_memory import is_out_of_memory

OUT_OF_MEMORY = "out of memory"


class Account(BaseModel):
    """Of one rank.

    Attributes:
        rank: Which one.
        error: The error's class, or `OUT_OF_MEMORY`.
        message: What it says.
        trace: Where it happened, if it is none of ours.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    error: str
    message: str
    trace: str = ""

    @classmethod
    def of(cls, rank: int, error: Exception) -> Account:
        """Of an error that ended a rank."""
        kind = OUT_OF_MEMORY if is_out_of_memory(error) else type(error).__name__
        if isinstance(error, errors.StagewrightError):
            return cls(rank=rank, error=kind, message=str(error))
        trace = "".join(traceback.format_exception(error))
        return cls(rank=rank, error=kind, message=str(error), trace=trace)

    def as_error(self) -> Exception:
        """The same kind of error, so that it has the exit code it would have without ranks."""
        if self.error == OUT_OF_MEMORY:
            return MemoryError(f"rank {self.rank} ran out of memory: {self.message}")
        kind = _OURS.get(self.error)
        if kind is not None:
            return kind(f"rank {self.rank}: {self.message}")
        unexpected = RuntimeError(f"rank {self.rank} raised {self.error}: {self.message}")
        unexpected.add_note(self.trace)
        return unexpected


_OURS: dict[str, type[errors.StagewrightError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidInput,
        errors.CaptureError,
        errors.MeasurementError,
        errors.PlanMismatch,
        errors.RankFailed,
        errors.Refused,
        errors.DeadlineExceeded,
    )
}
