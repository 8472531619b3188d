"""What can go wrong, sorted by what the caller does next.

StagewrightError
├── InvalidInput        fix the request: a field, a file, an option
├── Infeasible          relax a limit: the request is sound but nothing satisfies it
├── CaptureError        change the model or how it is captured
├── MeasurementError    the model ran and failed while being measured
│   └── OutOfMemory     use a smaller micro-batch, or a larger device
├── PlanMismatch        re-plan: the plan was made for another model, input or number of ranks
├── RankFailed          restart: a process of the pipeline died or stopped answering
├── Refused             get permission: it could be done, but is not allowed as asked
├── NotFound            name something else: there is nothing under that id
├── Unreachable         ask again later: the service does not answer
├── Cancelled           somebody stopped it; start it again if it is still wanted
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
        message: The binding constraint with both numbers, and the way out.
        constraint: Short name of the binding constraint, e.g. ``"memory"``.
        required: What the best attempt needs, in the constraint's unit.
        available: What the limit allows, in the same unit.
        remedies: `core.plan.remedies.Remedy` objects, least step time per sample first.
    """

    def __init__(
        self,
        message: str,
        *,
        constraint: str,
        required: float | None = None,
        available: float | None = None,
        remedies: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(message)
        self.constraint = constraint
        self.required = required
        self.available = available
        # Typed loosely: a remedy holds a cluster and options, and errors are below both.
        self.remedies = remedies


class CaptureError(StagewrightError):
    """A model could not be turned into a graph.

    Args:
        message: What happened and the ways out.
        module: Fully qualified name of the module to blame, if known.
        operation: The operation or source line that was refused, if known.
    """

    def __init__(
        self, message: str, *, module: str | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message)
        self.module = module
        self.operation = operation


class MeasurementError(StagewrightError):
    """The model was captured but failed while being measured; the message names the layer."""


class OutOfMemory(MeasurementError):
    """Measuring a layer needed more memory than there is; the message has both numbers.

    Args:
        message: Where, how much was needed, and the ways out.
        layer: Name of the layer to blame, if it is one.
        required_bytes: What that, or the whole model, needs.
        available_bytes: What the device, or the limit, has in all, if known.
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
    """Possible but not allowed; the message says what would allow it."""


class NotFound(StagewrightError):
    """Nothing is stored under that id."""


class Unreachable(StagewrightError, ConnectionError):
    """A service does not answer, or answers that it cannot just now."""


class Cancelled(StagewrightError):
    """A job was cancelled before it was done."""


class DeadlineExceeded(StagewrightError):
    """The time allowed ran out before there was an answer."""


def first_line(error: BaseException) -> str:
    """Of an error's message, which in torch goes on for pages; its kind if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
