"""Record of a rank's error, written by the rank and raised again by its launcher."""

from __future__ import annotations

import traceback

from pydantic import BaseModel, ConfigDict

from ...core import errors
from ...profiler.machine.out_of_memory import is_out_of_memory

OUT_OF_MEMORY = "out of memory"


class RankErrorRecord(BaseModel):
    """Error that ended a rank: its class or `OUT_OF_MEMORY`, and a trace unless it is ours."""

    model_config = ConfigDict(frozen=True)

    rank: int
    error: str
    message: str
    trace: str = ""

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankErrorRecord:
        kind = OUT_OF_MEMORY if is_out_of_memory(error) else type(error).__name__
        if isinstance(error, errors.StagewrightError):
            return cls(rank=rank, error=kind, message=str(error))
        trace = "".join(traceback.format_exception(error))
        return cls(rank=rank, error=kind, message=str(error), trace=trace)

    def to_error(self) -> Exception:
        """Return an error of the recorded class, so that the exit code is that of one process."""
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
