"""Query parameters of paged lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Query

from ...core.errors import InvalidInput
from .field_errors import FieldError, clip
from .problems import Problem

Limit = Annotated[int, Query(ge=1, le=500, description="How many, at most.")]
Cursor = Annotated[
    str | None, Query(max_length=100, description="The next_cursor of the page before.")
]

Search = Annotated[
    str,
    Query(
        max_length=200,
        description="Words, each of which is in the id, model, family, devices, schedule or "
        "status of what is listed, in letters of either case.",
    ),
]


@contextmanager
def blame_parameter(name: str) -> Iterator[None]:
    """Report invalid input as a query parameter at fault, not as a field of the body."""
    try:
        yield
    except InvalidInput as error:
        detail = clip(str(error))
        errors = [FieldError(parameter=name, detail=detail)]
        raise Problem(422, "invalid-input", detail, errors=errors) from None
