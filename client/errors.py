"""Mapping of the service's error responses to this library's exceptions."""

from __future__ import annotations

from pydantic import ValidationError

from ..core import errors
from ..core.errors import (
    Cancelled,
    ErrorRecord,
    InvalidInput,
    NotFound,
    Refused,
    StagewrightError,
    Unreachable,
)
from ..core.service.jobs import JobView
from ..core.service.problems import TYPE_PREFIX, ProblemDocument
from .sans_io import HttpReply

KNOWN = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StagewrightError)
)
"""The library's exceptions, to one of which every error of the service is mapped."""

BY_STATUS: dict[int, type[StagewrightError]] = {
    401: Refused,
    403: Refused,
    404: NotFound,
    429: Refused,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}
"""Exception by status, for problems of none of these classes; any other status from 500 on is a
failure of the service itself."""

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
    return _exception_class(reply.status)(
        f"{asked} returned {reply.status}, but not from Stagewright"
        + (f": {body!r}" if body else "")
        + "; check the service's URL and any proxy in between"
    )


def error_from_problem(problem: ProblemDocument) -> StagewrightError:
    """Return the exception for a problem; an `InvalidInput` points at the first invalid field."""
    kind = problem.type.removeprefix(TYPE_PREFIX)
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
    pointers = (entry.pointer for entry in problem.errors if entry.pointer)
    details = {"field": next(pointers, None), **problem.details}
    record = ErrorRecord(problem.kinds, message, details)
    return _exception_class(problem.status).from_record(record, KNOWN)


def error_from_job(job: JobView) -> StagewrightError:
    """Return the exception for a job that ended without a result."""
    if job.state == "cancelled":
        return Cancelled(f"{job.kind} job {job.id} was cancelled")
    if job.problem is None:
        return StagewrightError(f"{job.kind} job {job.id} failed; the service gave no reason")
    return error_from_problem(job.problem)


def _exception_class(status: int) -> type[StagewrightError]:
    return BY_STATUS.get(status, InvalidInput if 400 <= status < 500 else StagewrightError)
