"""Query parameters that no route knows are refused: one misspelt would be passed over silently."""

from __future__ import annotations

from fastapi import Request

from .field_errors import MAX_ERRORS, FieldError, clip
from .known_fields import meant, operation_of
from .problems import Problem

API = "/v1/"


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse parameters that a route of the API does not document; pages have their own.

    Raises:
        Problem: 422, with every such parameter.
    """
    if not request.scope["query_string"] or not request.url.path.startswith(API):
        return
    documented = operation_of(request).get("parameters", ())
    known = {each["name"] for each in documented if each["in"] == "query"}
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        errors = [
            FieldError(parameter=clip(name), detail=f"unknown parameter; {meant(name, known)}")
            for name in unknown[:MAX_ERRORS]
        ]
        detail = f"{errors[0].parameter}: {errors[0].detail}"
        raise Problem(422, "invalid-input", detail, errors=errors)
