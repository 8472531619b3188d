"""Outcome of a job as its row stores it: the problem document it failed with, or event data."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from ...core.errors import StagewrightError
from ..http.field_errors import clip
from ..http.problems import (
    MAX_DETAIL_CHARACTERS,
    TYPE_PREFIX,
    Problem,
    ProblemDocument,
    internal_problem,
    problem_of_error,
)
from .measurements import to_error
from .messages import TaskFailed

_log = logging.getLogger(__name__)


def problem_of(error: Exception) -> ProblemDocument:
    """Return the problem document of any error; internal errors are logged and not described."""
    if isinstance(error, Problem):
        return error.document
    if isinstance(error, StagewrightError):
        return problem_of_error(error).document
    _log.error("a job failed with an internal error", exc_info=error)
    return internal_problem().document


def problem_from_failure(failure: TaskFailed) -> ProblemDocument:
    """Return the problem document of a worker's failure."""
    error = error_from_failure(failure)
    return internal_problem().document if error is None else problem_of(error)


def error_from_failure(failure: TaskFailed) -> StagewrightError | None:
    """Return a worker's failure as an error; `None`, and a line in the log, if it is internal."""
    texts = {name: getattr(failure, name) for name in ("message", "field", "layer")}
    clean: Any = {name: to_printable(text) for name, text in texts.items() if text is not None}
    error = to_error(replace(failure, **clean))
    if error is None:
        _log.error("a worker failed with an internal error: %s", failure.message)
    return error


def to_printable(text: str) -> str:
    """Return text without lone surrogates, which a child's JSON may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def problem_json(problem: ProblemDocument) -> str:
    """Return a problem document as a job's row stores it."""
    return problem.model_dump_json(exclude_defaults=True, exclude_none=True)


def new_problem_json(status: int, kind: str, detail: str) -> str:
    """Return a problem that has no error class, as a job's row stores it."""
    return problem_json(Problem(status, kind, clip(detail, MAX_DETAIL_CHARACTERS)).document)


def read_problem(outcome_json: str | None) -> ProblemDocument | None:
    """Return the problem document stored in a job's row, if any."""
    return None if outcome_json is None else ProblemDocument.model_validate_json(outcome_json)


def to_exception(document: ProblemDocument) -> Problem:
    """Return a stored problem as an exception, to answer a request that waited for the job."""
    problem = Problem(document.status, document.type.removeprefix(TYPE_PREFIX), document.detail)
    problem.document = document
    return problem


def event_data(**values: object) -> str:
    """Return the JSON data of an event, without the values that are unknown."""
    return json.dumps({name: value for name, value in values.items() if value is not None})
