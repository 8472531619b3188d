"""Outcome of a job as its row stores it: the problem document it failed with, or event data."""

from __future__ import annotations

import json

from ...core.errors import ForeignError, StagewrightError
from ..http.problems import ProblemDocument, problem_of_error
from .messages import ERRORS, TaskFailed


def problem_json(error: Exception) -> str:
    """Return the problem document of any error as a job's row stores it."""
    problem = problem_of_error(ForeignError.of(error))
    return problem.document.model_dump_json(exclude_defaults=True, exclude_none=True)


def error_from_failure(failure: TaskFailed) -> StagewrightError:
    """Return a worker's failure as an error; an internal one is a bare `StagewrightError`."""
    return StagewrightError.from_record(failure.error, ERRORS)


def read_problem(outcome_json: str | None) -> ProblemDocument | None:
    """Return the problem document stored in a job's row, if any."""
    if outcome_json is None:
        return None
    return ProblemDocument.model_validate_json(outcome_json)


def event_data(**values: object) -> str:
    """Return the JSON data of an event, without the values that are unknown."""
    return json.dumps({name: value for name, value in values.items() if value is not None})
