"""The library's exceptions, grouped by what the caller does next.

StagewrightError
├── InvalidInput        fix the request: a field, a file, an option
├── Infeasible          relax a limit: the request is sound but nothing satisfies it
├── CaptureError        change the model or how it is captured
├── MeasurementError    the model ran and failed while being measured
│   └── OutOfMemory     use a smaller micro-batch, or a larger device
├── NonFinite           correct the data or the training: a loss or gradient is infinite or NaN
├── PlanMismatch        re-plan: the plan was made for another model, input or number of ranks
├── RankFailed          restart: a process of the pipeline died or stopped answering
├── Refused             get permission: it could be done, but is not allowed as asked
├── NotFound            use another id: nothing is stored under this one
├── Unreachable         try again later: the service does not answer
├── Cancelled           the job was stopped; submit it again if it is still wanted
└── DeadlineExceeded    allow more time, or take the best answer so far
"""

from __future__ import annotations

from typing import Any


class StagewrightError(Exception):
    """Base of every error this library raises on purpose."""


class InvalidInput(StagewrightError, ValueError):
    """The request itself is wrong; the message names the field and what is accepted.

    Args:
        message: What is wrong and what to do.
        field: JSON pointer of the offending field, when there is one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Infeasible(StagewrightError):
    """No plan satisfies the limits.

    Args:
        message: The binding constraint with both numbers, and the remedies.
        constraint: Short name of the binding constraint, e.g. ``"memory"``.
        required: Requirement of the best attempt, in the constraint's unit.
        available: The limit, in the same unit.
        remedies: `core.plan.plan.Remedy` objects, least step time per sample first.
        summary: The message without the remedies; all of it by default.
    """

    def __init__(
        self,
        message: str,
        *,
        constraint: str,
        required: float | None = None,
        available: float | None = None,
        remedies: tuple[Any, ...] = (),
        summary: str = "",
    ) -> None:
        super().__init__(message)
        self.summary = summary or message
        self.constraint = constraint
        self.required = required
        self.available = available
        # Typed loosely: a remedy holds a cluster and options, and errors are below both.
        self.remedies = remedies


class CaptureError(StagewrightError):
    """A model could not be turned into a graph.

    Args:
        message: What happened and the remedies.
        module: Fully qualified name of the module that caused it, if known.
        operation: The operation or source line that caused it, if known.
    """

    def __init__(
        self, message: str, *, module: str | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message)
        self.module = module
        self.operation = operation


class MeasurementError(StagewrightError):
    """The model was captured but failed during measurement; the message names the layer."""


class OutOfMemory(MeasurementError):
    """Measuring a layer needed more memory than available; the message has both numbers.

    Args:
        message: Where, how much was needed, and the remedies.
        layer: Name of the layer; `None` if the model as a whole does not fit.
        required_bytes: Memory needed by the layer, or by the whole model.
        available_bytes: Total memory of the device, or the limit, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: str | None = None,
        required_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class NonFinite(StagewrightError, FloatingPointError):
    """A loss or a gradient is infinite or NaN; the message says where it arose."""


class PlanMismatch(StagewrightError):
    """A plan does not belong to this model, this input or this number of ranks."""


class RankFailed(StagewrightError):
    """A process of a pipeline died or stopped answering.

    Args:
        message: Which rank failed and what this rank was waiting for.
        ranks: The ranks held to have failed, lowest first; empty if all still answer.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Refused(StagewrightError):
    """The request is possible but not permitted; the message says what would permit it."""


class NotFound(StagewrightError):
    """Nothing is stored under the given id."""


class Unreachable(StagewrightError, ConnectionError):
    """The service cannot be reached, or is temporarily unavailable."""


class Cancelled(StagewrightError):
    """A job was cancelled before it finished."""


class DeadlineExceeded(StagewrightError):
    """The time allowed ran out before there was an answer."""


MAX_LINE = 1000


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the exception's class name if it is empty."""
    # torch appends whole tracebacks and graphs to its messages.
    lines = str(error).strip().splitlines()
    return lines[0][:MAX_LINE] if lines else type(error).__name__
