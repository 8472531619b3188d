"""Refusal of unknown query parameters: a misspelt one would otherwise be ignored silently."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant

from .field_errors import MAX_ERRORS, FieldError, clip
from .problems import Problem
from .unknown_fields import suggest_name

API = "/v1/"


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that a route of the API does not document.

    Raises:
        Problem: 422, listing them.
    """
    if not request.scope["query_string"] or not request.url.path.startswith(API):
        return
    # From the route's own declaration, so that no second list can fall behind.
    known = set(_names(request.scope["route"].dependant))
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        errors = [
            FieldError(
                parameter=clip(name), detail="unknown parameter; " + suggest_name(name, known)
            )
            for name in unknown[:MAX_ERRORS]
        ]
        detail = f"{errors[0].parameter}: {errors[0].detail}"
        raise Problem(422, "invalid-input", detail, errors=errors)


def _names(dependant: Dependant) -> Iterator[str]:
    """Yield the query parameters of a route and of its dependencies."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _names(inner)
