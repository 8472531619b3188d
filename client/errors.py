"""Mapping of the service's error responses to this library's exceptions."""

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
from ..core.service.problems import TYPE_PREFIX, ProblemDocument
from .sans_io import HttpReply

BY_KIND: dict[str, type[StagewrightError]] = {
    "capture-failed": CaptureError,
    "deadline-exceeded": DeadlineExceeded,
    "measurement-failed": MeasurementError,
    "measuring-unavailable": Refused,
    "not-found": NotFound,
    "out-of-memory": OutOfMemory,
}
"""Exception by the last part of the problem's type; other problems are mapped by their status."""

BY_STATUS: dict[int, type[StagewrightError]] = {
    401: Refused,
    403: Refused,
    404: NotFound,
    429: Refused,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}
"""Exception by status; any other status from 500 on is a failure of the service itself."""

REMOTE_KINDS = frozenset({"capture-failed", "measurement-failed", "measuring-unavailable"})
"""Problems whose detail may say what to install or change on the machine that runs the service."""

HINTS = {
    401: "pass the service's token as token=, --token or STAGEWRIGHT_TOKEN",
    413: "leave out fields the service does not need, or profile the model locally and send the "
    "profile",
}
"""Advice that only the client can give."""

MAX_FOREIGN_CHARACTERS = 200


def read_problem(reply: HttpReply) -> ProblemDocument | None:
    """Parse the problem document; return `None` if the reply is not from the service itself."""
    try:
        return ProblemDocument.model_validate_json(reply.body, extra="ignore")
    except ValidationError:
        return None


def error_from_reply(reply: HttpReply, asked: object) -> StagewrightError:
    """Return the exception for an unsuccessful reply to the request ``asked``."""
    problem = read_problem(reply)
    if problem is not None:
        return error_from_problem(problem)
    # A proxy or another web server answered. Quote it, so that the user can tell which.
    body = reply.body.decode("utf-8", "replace").strip()[:MAX_FOREIGN_CHARACTERS]
    return _exception_class("", reply.status)(
        f"{asked} returned {reply.status}, but not from Stagewright"
        + (f": {body!r}" if body else "")
        + "; check the service's URL and any proxy in between"
    )


def error_from_problem(problem: ProblemDocument) -> StagewrightError:
    """Return the exception for a problem; an `InvalidInput` points at the first invalid field."""
    kind = problem.type.removeprefix(TYPE_PREFIX)
    found = _exception_class(kind, problem.status)
    where = "on the service: " if kind in REMOTE_KINDS else ""
    lines = [f"{where}{problem.detail}"]
    if len(problem.errors) > 1:  # the detail names the only field at fault
        lines += [
            f"{entry.pointer or entry.parameter or '(body)'}: {entry.detail}"
            for entry in problem.errors
        ]
    message = "\n  ".join(lines)
    if hint := HINTS.get(problem.status):
        message += f"; {hint}"
    if issubclass(found, InvalidInput):
        pointers = (entry.pointer for entry in problem.errors if entry.pointer)
        return found(message, field=next(pointers, None))
    if issubclass(found, OutOfMemory):
        return found(
            message,
            layer=problem.layer,
            required_bytes=problem.required_bytes,
            available_bytes=problem.available_bytes,
        )
    return found(message)


def error_from_job(job: JobView) -> StagewrightError:
    """Return the exception for a job that ended without a result."""
    if job.state == "cancelled":
        return Cancelled(f"{job.kind} job {job.id} was cancelled")
    if job.problem is None:
        return StagewrightError(f"{job.kind} job {job.id} failed; the service gave no reason")
    return error_from_problem(job.problem)


def _exception_class(kind: str, status: int) -> type[StagewrightError]:
    found = BY_KIND.get(kind) or BY_STATUS.get(status)
    if found is not None:
        return found
    return InvalidInput if 400 <= status < 500 else StagewrightError
