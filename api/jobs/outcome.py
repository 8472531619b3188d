"""The end of a job: the problem it failed with, as its row keeps it and as it is told."""

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
from .measurements import error_of
from .messages import TaskFailed

_log = logging.getLogger(__name__)


def problem_of(error: Exception) -> ProblemDocument:
    """Any error as what a caller is told."""
    if isinstance(error, Problem):
        return error.document
    if isinstance(error, StagewrightError):
        return problem_of_error(error).document
    _log.error("a job failed by a fault of ours", exc_info=error)
    return internal_problem().document


def problem_from_failure(told: TaskFailed) -> ProblemDocument:
    """What a worker failed with."""
    error = error_from_failure(told)
    return internal_problem().document if error is None else problem_of(error)


def error_from_failure(told: TaskFailed) -> StagewrightError | None:
    """The same as an error; `None`, and a line in the log, for a fault of ours."""
    texts = {name: getattr(told, name) for name in ("message", "field", "layer")}
    said: Any = {name: printable(text) for name, text in texts.items() if text is not None}
    error = error_of(replace(told, **said))
    if error is None:
        _log.error("a worker failed by a fault of ours: %s", told.message)
    return error


def printable(text: str) -> str:
    """Text of a child as text that can be sent: half a character is none."""
    return text.encode("utf-8", "replace").decode()


def new_problem(status: int, kind: str, detail: str) -> ProblemDocument:
    """A problem that no error class stands for."""
    return Problem(status, kind, clip(detail, MAX_DETAIL_CHARACTERS)).document


def as_json(problem: ProblemDocument) -> str:
    """For the job's row."""
    return problem.model_dump_json(exclude_defaults=True, exclude_none=True)


def from_json(outcome_json: str | None) -> ProblemDocument | None:
    """And back."""
    return None if outcome_json is None else ProblemDocument.model_validate_json(outcome_json)


def to_exception(document: ProblemDocument) -> Problem:
    """To be raised, as the answer to a request that waited for the job."""
    problem = Problem(document.status, document.type.removeprefix(TYPE_PREFIX), document.detail)
    problem.document = document
    return problem


def as_data(**values: object) -> str:
    """Of an event, what is known."""
    return json.dumps({name: value for name, value in values.items() if value is not None})
