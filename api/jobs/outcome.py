"""Outcome of a job as its row stores it: the problem document it failed with, or event data."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from ...core.errors import StagewrightError
from ..http.problems import ProblemDocument, internal_problem, problem_of_error
from .messages import TaskFailed, to_error

_log = logging.getLogger(__name__)


def problem_json(error: Exception) -> str:
    """Return the problem document of any error as a job's row stores it.

    Internal errors are logged and not described.
    """
    if isinstance(error, StagewrightError):
        problem = problem_of_error(error)
    else:
        _log.error("a job failed with an internal error", exc_info=error)
        problem = internal_problem()
    return _to_json(problem.document)


def problem_from_failure(failure: TaskFailed) -> str:
    """Return the problem document of a worker's failure as a job's row stores it."""
    error = error_from_failure(failure)
    return _to_json(internal_problem().document) if error is None else problem_json(error)


def _to_json(problem: ProblemDocument) -> str:
    return problem.model_dump_json(exclude_defaults=True, exclude_none=True)


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


def read_problem(outcome_json: str | None) -> ProblemDocument | None:
    """Return the problem document stored in a job's row, if any."""
    return None if outcome_json is None else ProblemDocument.model_validate_json(outcome_json)


def event_data(**values: object) -> str:
    """Return the JSON data of an event, without the values that are unknown."""
    return json.dumps({name: value for name, value in values.items() if value is not None})
