"""Every error as an RFC 9457 problem: ``application/problem+json``.

Routes and services raise the errors of `core.errors` and `store`; the table `STATUS` says which
status each becomes. A layer that has no error class of its own raises `Problem` directly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as FrameworkError

from ...core.errors import (
    CaptureError,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
    StagewrightError,
)
from ...core.service.problems import MEDIA_TYPE as MEDIA_TYPE
from ...core.service.problems import TYPE_PREFIX as TYPE_PREFIX
from ...core.service.problems import ProblemDocument as ProblemDocument
from ..errors import MeasuringUnavailable, SolverEnded, WorkersUnavailable
from ..store.errors import AnswerPending, KeyReused, RecordNotFound, StoreUnavailable, TooManyJobs
from ..telemetry.log_context import request_id
from .allowed_methods import Paths, allowed_methods, missing_page
from .field_errors import FieldError, clip, field_errors
from .unknown_fields import nearest_fields

MAX_DETAIL_CHARACTERS = 2000

UNKNOWN = "extra_forbidden"
"""What pydantic calls the error of a field that its model does not have."""

STATUS: tuple[tuple[type[StagewrightError], int, str], ...] = (
    (RecordNotFound, 404, "not-found"),
    (KeyReused, 422, "idempotency-key-reused"),
    (AnswerPending, 409, "answer-pending"),
    (TooManyJobs, 429, "too-many-jobs"),
    (InvalidInput, 422, "invalid-input"),
    (CaptureError, 422, "capture-failed"),
    (OutOfMemory, 422, "out-of-memory"),
    (MeasurementError, 422, "measurement-failed"),
    (MeasuringUnavailable, 501, "measuring-unavailable"),
    (SolverEnded, 503, "planning-ended"),
    (WorkersUnavailable, 503, "workers-unavailable"),
    (DeadlineExceeded, 504, "deadline-exceeded"),
)
"""The first class that fits gives the status and the kind; anything else is our fault: 500."""

_log = logging.getLogger(__name__)


class Problem(HTTPException):
    """An error that already knows its HTTP status.

    FastAPI lets its own ``HTTPException`` through where it takes any other for a broken body.

    Args:
        status: HTTP status code.
        kind: Last part of the problem type, e.g. ``body-too-large``.
        detail: What happened and the way out.
        errors: Fields at fault.
        headers: Further response headers.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.kind = kind
        self.document = ProblemDocument(
            type=TYPE_PREFIX + kind,
            title=kind.replace("-", " ").capitalize().replace("json", "JSON"),
            status=status,
            detail=clip(detail, MAX_DETAIL_CHARACTERS),
            errors=tuple(errors),
        )

    def response(self) -> Response:
        """The problem as a response to the request that is being answered."""
        document = self.document.model_copy(update={"request_id": request_id()})
        content = document.model_dump_json(exclude_defaults=True, exclude_none=True)
        return Response(content, self.document.status, self.headers, MEDIA_TYPE)


def install_problems(app: FastAPI, paths: Paths) -> None:
    """Make every error of an application a problem.

    Args:
        app: The application.
        paths: What its documentation lists.
    """

    async def on_problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, FrameworkError)
        if error.status_code == 405 and (allowed := allowed_methods(paths, request.url.path)):
            error.headers = {**(error.headers or {}), "Allow": allowed}
            error.detail = f"{request.method} is not for this path, which takes {allowed}"
        if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
            error.detail = missing_page(paths, request.url.path)
        return from_http(error).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error, request).response()

    async def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, StagewrightError)
        return from_error(error).response()

    async def on_bug(_: Request, error: Exception) -> Response:
        return internal_problem().response()

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(FrameworkError, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(StagewrightError, on_ours)
    app.add_exception_handler(Exception, on_bug)


def from_http(error: FrameworkError) -> Problem:
    """An error of the framework's own: an unknown path, a method that is not allowed."""
    phrase = HTTPStatus(error.status_code).phrase
    return Problem(
        error.status_code,
        phrase.lower().replace(" ", "-"),
        error.detail,
        headers=error.headers,
    )


def from_validation(error: RequestValidationError, request: Request | None = None) -> Problem:
    """A request that does not fit its model, every field named; of unknown ones the nearest."""
    errors = field_errors(error.errors(), error.body)
    if request is not None:
        errors = [
            _with_nearest(found, request, error.body) if item["type"] == UNKNOWN else found
            for item, found in zip(error.errors(), errors, strict=False)
        ]
    count = f"{len(error.errors())} fields do" if len(error.errors()) > 1 else "one field does"
    detail = f"{count} not fit; {errors[0].pointer or errors[0].parameter or 'the body'}: "
    return Problem(422, "invalid-input", detail + errors[0].detail, errors=errors)


def _with_nearest(found: FieldError, request: Request, body: object) -> FieldError:
    meant = nearest_fields(request, found.pointer or "", body)
    return found.model_copy(update={"detail": f"{found.detail}; {meant}"})


def from_error(error: StagewrightError) -> Problem:
    """One of our own errors, by the table `STATUS`."""
    if isinstance(error, StoreUnavailable):
        return unavailable_problem(error)
    for error_class, status, kind in STATUS:
        if isinstance(error, error_class):
            field = error.field if isinstance(error, InvalidInput) else None
            errors = () if field is None else (FieldError(pointer=field, detail=clip(str(error))),)
            problem = Problem(status, kind, str(error), errors=errors)
            return _with_memory(problem, error) if isinstance(error, OutOfMemory) else problem
    _log.error("%s: %s", type(error).__name__, error, exc_info=error)
    return internal_problem()


def _with_memory(problem: Problem, error: OutOfMemory) -> Problem:
    problem.document = problem.document.model_copy(
        update={
            "layer": error.layer,
            "required_bytes": error.required_bytes,
            "available_bytes": error.available_bytes,
        }
    )
    return problem


def unavailable_problem(error: Exception) -> Problem:
    """The database does not answer; where it is and what it said goes to the log alone."""
    _log.error("%s", error)
    return Problem(
        503, "database-unreachable", "the database does not answer; ask again a little later"
    )


def internal_problem() -> Problem:
    """Our fault; says nothing of what happened, the server's log does."""
    return Problem(
        500,
        "internal-error",
        "the server failed to answer this request; its log has the details",
    )
