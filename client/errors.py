"""What a service refuses, as this library's own exceptions, with the service's words."""

from __future__ import annotations

from pydantic import ValidationError

from ..core.errors import (
    Cancelled,
    CaptureError,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    NotFound,
    OutOfMemory,
    Refused,
    StagewrightError,
    Unreachable,
)
from ..core.service.jobs import JobView
from ..core.service.problems import TYPE_PREFIX, FieldError, ProblemDocument
from .sans_io import Reply

BY_KIND: dict[str, type[StagewrightError]] = {
    "capture-failed": CaptureError,
    "deadline-exceeded": DeadlineExceeded,
    "measurement-failed": MeasurementError,
    "measuring-unavailable": Refused,
    "not-found": NotFound,
    "out-of-memory": OutOfMemory,
}
"""By the last part of the problem's type; others go by their status."""

BY_STATUS: dict[int, type[StagewrightError]] = {
    401: Refused,
    403: Refused,
    404: NotFound,
    429: Refused,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}
"""What is neither here nor below 500 is a failure of the service itself."""

OVER_THERE = frozenset({"capture-failed", "measurement-failed", "measuring-unavailable"})
"""Problems whose words may name what to install or change on the machine that had them."""

HINTS = {
    401: "give the service's token as token=, --token or in STAGEWRIGHT_TOKEN",
    413: "leave out what the service has no use for, or profile the model where it is and send "
    "the profile",
}
"""What to do next, where the service cannot know."""

MAX_FOREIGN_CHARACTERS = 200


def problem_of(reply: Reply) -> ProblemDocument | None:
    """The problem a reply carries; `None` if it comes from something in between."""
    try:
        return ProblemDocument.model_validate_json(reply.body, extra="ignore")
    except ValidationError:
        return None


def error_of(reply: Reply, asked: object) -> StagewrightError:
    """The exception for a reply that is no success.

    Args:
        reply: Any status from 300 on.
        asked: What was asked, for the message.
    """
    problem = problem_of(reply)
    if problem is not None:
        return error_of_problem(problem)
    said = reply.body.decode("utf-8", "replace").strip()[:MAX_FOREIGN_CHARACTERS]
    found = _class_of("", reply.status)
    return found(
        f"{asked} was answered {reply.status}, and not by Stagewright"
        + (f": {said!r}" if said else "")
        + "; is this the service's address, and does a proxy stand in between?"
    )


def error_of_problem(problem: ProblemDocument) -> StagewrightError:
    """The exception for a problem; an `InvalidInput` points at the first field at fault."""
    kind = problem.type.removeprefix(TYPE_PREFIX)
    found = _class_of(kind, problem.status)
    where = "on the service: " if kind in OVER_THERE else ""
    message = "\n  ".join([f"{where}{problem.detail}", *_further(problem.errors)])
    if hint := HINTS.get(problem.status):
        message += f"; {hint}"
    if issubclass(found, InvalidInput):
        return found(message, field=_first_field(problem.errors))
    if issubclass(found, OutOfMemory):
        return found(
            message,
            layer=problem.layer,
            required_bytes=problem.required_bytes,
            available_bytes=problem.available_bytes,
        )
    return found(message)


def error_of_job(job: JobView) -> StagewrightError:
    """The exception for a job that ended without a result."""
    if job.state == "cancelled":
        return Cancelled(f"{job.kind} job {job.id} was cancelled")
    if job.problem is None:
        return StagewrightError(f"{job.kind} job {job.id} failed, and the service does not say why")
    return error_of_problem(job.problem)


def _class_of(kind: str, status: int) -> type[StagewrightError]:
    found = BY_KIND.get(kind) or BY_STATUS.get(status)
    if found is not None:
        return found
    return InvalidInput if 400 <= status < 500 else StagewrightError


def _first_field(errors: tuple[FieldError, ...]) -> str | None:
    return next((entry.pointer for entry in errors if entry.pointer), None)


def _further(errors: tuple[FieldError, ...]) -> list[str]:
    """Every field at fault, where there are several; the problem's own words name the first."""
    if len(errors) < 2:
        return []
    return [f"{entry.pointer or entry.parameter or '(body)'}: {entry.detail}" for entry in errors]
