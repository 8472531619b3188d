"""The OpenAPI document: FastAPI's own, plus the bearer token and the problem responses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .auth.access import OPEN_PATHS
from .http.problems import MEDIA_TYPE, ProblemDocument

REF = "#/components/schemas/{model}"

PROBLEM_RESPONSE: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Any error, as an RFC 9457 problem",
        "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="ProblemDocument")}}},
    }
}
"""``responses`` of every router; it also keeps FastAPI's own error schema out."""


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    components = document.setdefault("components", {})
    schema = ProblemDocument.model_json_schema(ref_template=REF)
    components.setdefault("schemas", {}).update(schema.pop("$defs", {}), ProblemDocument=schema)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in OPEN_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation["security"] = []
    return document
