"""RFC 9457 problem documents: ``application/problem+json`` for every error.

Services raise the errors of `core.errors`, `api.errors` and `store.errors`; the table `STATUS`
gives each its HTTP status. Routes and middleware raise `Problem` directly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as FrameworkError
from starlette.routing import compile_path

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
from .. import errors as own
from ..store import errors as stored
from ..telemetry.tracing import request_id
from .field_errors import FieldError, clip, field_errors, suggest_field

MAX_DETAIL_CHARACTERS = 2000

RETRY_AFTER_S = 10
"""Wait for clients that are refused for a reason that passes."""

SCHEMA_REF = "#/components/schemas/{model}"

PROBLEM_RESPONSE: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Any error, as an RFC 9457 problem",
        "content": {MEDIA_TYPE: {"schema": {"$ref": SCHEMA_REF.format(model="ProblemDocument")}}},
    }
}
"""``responses`` of every router; it also keeps FastAPI's own error schema out."""

UNKNOWN = "extra_forbidden"
"""pydantic's type of error for a field that the model does not have."""

STATUS: tuple[tuple[type[StagewrightError], int, str], ...] = (
    (own.Unauthorized, 401, "unauthorized"),
    (own.Forbidden, 403, "forbidden"),
    (own.MissingOrigin, 403, "foreign-origin"),
    (own.TooManyWrongTokens, 429, "too-many-wrong-tokens"),
    (own.IdentityProviderUnreachable, 503, "identity-provider-unreachable"),
    (stored.StoreUnavailable, 503, "database-unreachable"),
    (stored.RecordNotFound, 404, "not-found"),
    (stored.KeyReused, 422, "idempotency-key-reused"),
    (stored.AnswerPending, 409, "answer-pending"),
    (stored.TooManyJobs, 429, "too-many-jobs"),
    (own.TooManyWaiting, 429, "too-many-waiting"),
    (stored.StorageFull, 409, "storage-full"),
    (stored.ProfileInUse, 409, "profile-in-use"),
    (InvalidInput, 422, "invalid-input"),
    (CaptureError, 422, "capture-failed"),
    (OutOfMemory, 422, "out-of-memory"),
    (MeasurementError, 422, "measurement-failed"),
    (own.MeasuringUnavailable, 501, "measuring-unavailable"),
    (own.SolverEnded, 503, "planning-ended"),
    (own.WorkersUnavailable, 503, "workers-unavailable"),
    (own.WorkerGaveOut, 503, "worker-lost"),
    (own.JobUnreadable, 500, "internal-error"),
    (own.NoPlan, 409, "no-plan"),
    (own.RequestDeadlineExceeded, 422, "deadline-exceeded"),
    (DeadlineExceeded, 504, "deadline-exceeded"),
)
"""HTTP status and problem type by error class, subclasses before their bases. An error that is
not listed is our own fault: 500."""

_log = logging.getLogger(__name__)


class Problem(HTTPException):
    """Error with an HTTP status and a problem document.

    Derived from FastAPI's ``HTTPException`` because FastAPI turns any other exception raised while
    a body is read into a 400 of its own.
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
        """Return the response to the current request."""
        document = self.document.model_copy(update={"request_id": request_id()})
        content = document.model_dump_json(exclude_defaults=True, exclude_none=True)
        return Response(content, self.document.status, self.headers, MEDIA_TYPE)


def install_problems(app: FastAPI, paths: Paths) -> None:
    """Turn every error of an application, with these documented paths, into a problem document."""

    async def on_problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, FrameworkError)
        # Starlette lists the methods of the first matching route alone; see `allowed_methods`.
        if error.status_code == 405 and (allowed := allowed_methods(paths, request.url.path)):
            error.headers = {**(error.headers or {}), "Allow": allowed}
            error.detail = f"{request.method} is not allowed here. Allowed: {allowed}."
        # Only Starlette's own 404: one that a route raises says more.
        if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
            error.detail = unknown_path_message(paths, request.url.path)
        return problem_of_http_error(error).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_of_validation(error, request).response()

    async def on_domain_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, StagewrightError)
        return problem_of_error(error).response()

    async def on_bug(_: Request, error: Exception) -> Response:
        return internal_problem().response()

    # Starlette takes the handler of the most derived class, whatever the order here.
    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(FrameworkError, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(StagewrightError, on_domain_error)
    app.add_exception_handler(Exception, on_bug)


def problem_of_http_error(error: FrameworkError) -> Problem:
    """Return the problem for an error of the framework: unknown path, method not allowed."""
    phrase = HTTPStatus(error.status_code).phrase
    return Problem(
        error.status_code,
        phrase.lower().replace(" ", "-"),
        error.detail,
        headers=error.headers,
    )


def problem_of_validation(error: RequestValidationError, request: Request | None = None) -> Problem:
    """Return the problem for an invalid request, with every field at fault."""
    # Suggestions need the body's type, which is the route's; without a request there are none.
    errors = field_errors(error.errors(), error.body)
    if request is not None:
        errors = [
            _with_nearest(found, request, error.body) if item["type"] == UNKNOWN else found
            for item, found in zip(error.errors(), errors, strict=False)
        ]
    count = f"{len(error.errors())} invalid fields" if len(error.errors()) > 1 else "Invalid field"
    detail = f"{count}: {errors[0].pointer or errors[0].parameter or 'the body'}: "
    return Problem(422, "invalid-input", detail + errors[0].detail, errors=errors)


def _with_nearest(found: FieldError, request: Request, body: object) -> FieldError:
    suggestion = suggest_field(request, found.pointer or "", body)
    return found.model_copy(update={"detail": f"{found.detail}; {suggestion}"})


def problem_of_error(error: StagewrightError) -> Problem:
    """Return the problem for a domain error, by the table `STATUS`."""
    for error_class, status, kind in STATUS:
        if isinstance(error, error_class):
            field = getattr(error, "field", None)
            errors = () if field is None else (FieldError(pointer=field, detail=clip(str(error))),)
            is_passing = status == 503 or isinstance(error, own.TooManyWaiting)
            headers = {"Retry-After": str(RETRY_AFTER_S)} if is_passing else {}
            headers |= _headers(error)
            problem = Problem(status, kind, _detail(error), errors=errors, headers=headers)
            record = error.to_record()
            told = {"kinds": record.kinds, "details": record.details}
            problem.document = problem.document.model_copy(update=told)
            return problem
    _log.error("%s: %s", type(error).__name__, error, exc_info=error)
    return internal_problem()


def _detail(error: StagewrightError) -> str:
    if isinstance(error, stored.StoreUnavailable):
        # The message may hold the database's address, which goes to the log alone.
        _log.error("%s", error)
        return "The database does not answer, or refuses to write. Retry a little later."
    return str(error)


def _headers(error: StagewrightError) -> dict[str, str]:
    if isinstance(error, own.TooManyWrongTokens | own.IdentityProviderUnreachable):
        return {"Retry-After": str(error.retry_after_s)}
    # Challenges as in RFC 6750, section 3: without credentials there is no error code.
    if isinstance(error, own.Unauthorized):
        challenge = 'Bearer error="invalid_token"' if error.is_invalid_token else "Bearer"
    elif isinstance(error, own.Forbidden) and error.scope is not None:
        challenge = f'Bearer error="insufficient_scope", scope="{error.scope}"'
    else:
        return {}
    return {"WWW-Authenticate": challenge}


def rebuild_problem(document: ProblemDocument) -> Problem:
    """Return a stored problem as an exception, to answer a request that waited for its job."""
    problem = Problem(document.status, document.type.removeprefix(TYPE_PREFIX), document.detail)
    problem.document = document
    return problem


def internal_problem() -> Problem:
    """Return the problem for a fault of ours; details go to the server's log alone."""
    return Problem(
        500, "internal-error", "The server failed to answer this request. See its log for details."
    )


Paths = Mapping[str, frozenset[str]]
"""Methods by documented path."""


def documented_paths(routers: Iterable[APIRouter]) -> Paths:
    """Return what the OpenAPI document lists, without building it, which takes most of a second."""
    found: dict[str, frozenset[str]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                found[route.path] = found.get(route.path, frozenset()) | set(route.methods or ())
    return found


def allowed_methods(paths: Paths, path: str) -> str | None:
    """Return the ``Allow`` header (RFC 9110, 10.2.1), or None for an undocumented path."""
    fitting = [path] if path in paths else [known for known in paths if _fits(known, path)]
    found = {method for known in fitting for method in paths[known]}
    return ", ".join(sorted(found)) or None


def unknown_path_message(paths: Paths, path: str) -> str:
    """Return the message for an unknown path, with the nearest known one."""
    # Cut: comparing takes time that grows with the product of the lengths.
    near = get_close_matches(path[:200], paths, n=1, cutoff=0.8)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"No such page.{meant} See GET /openapi.json for all paths."


def _fits(template: str, path: str) -> bool:
    return compile_path(template)[0].match(path) is not None
