"""Construction of requests: paths, query parameters, bodies and idempotency keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel

from ..core.errors import InvalidInput
from .sans_io import HttpRequest

JSON_TYPE = "application/json"


def build_get(*path: str, **params: object) -> HttpRequest:
    """Build a GET request; parameters that are `None` are left out."""
    drop_none = {name: str(value) for name, value in params.items() if value is not None}
    return HttpRequest("GET", api_path(*path), drop_none)


def build_create(
    *path: str, fields: object, fresh: bool = False, headers: Mapping[str, str] | None = None
) -> HttpRequest:
    """Build a POST that creates something; ``fresh`` bypasses the service's caches.

    Its idempotency key makes it safe to repeat: the service creates the thing at most once.
    """
    freshly = {"Cache-Control": "no-cache"} if fresh else {}
    return _post(path, fields, {"Idempotency-Key": uuid4().hex, **freshly, **(headers or {})})


def build_query(*path: str, fields: object, method: str = "POST") -> HttpRequest:
    """Build a request with a body that creates nothing."""
    return replace(_post(path, fields, {}), method=method)


def build_once(*path: str, fields: object) -> HttpRequest:
    """Build a POST that must not be repeated: the service could not give its answer again."""
    return replace(_post(path, fields, {}), is_repeatable=False)


def build_delete(*path: str, **params: object) -> HttpRequest:
    """Build a DELETE; parameters that are `None` are left out."""
    return replace(build_get(*path, **params), method="DELETE")


def _post(path: tuple[str, ...], fields: object, headers: Mapping[str, str]) -> HttpRequest:
    return HttpRequest(
        "POST",
        api_path(*path),
        headers={"Content-Type": JSON_TYPE, **headers},
        body=json_bytes(fields),
    )


def api_path(*parts: str) -> str:
    """Join quoted segments to a path below ``/v1``; refuse an empty one."""
    if not all(parts):  # "/v1/plans/" + "" would list all plans instead of reading one
        raise InvalidInput("empty id; pass the id of a stored plan, profile, graph, job or key")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def to_json_value(value: Any) -> Any:
    """Convert records to JSON values; return anything else as it is."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return value


def json_bytes(fields: object) -> bytes:
    """Encode fields as JSON."""
    try:
        return json.dumps(fields, allow_nan=False, default=to_json_value).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"cannot encode the request as JSON: {error}") from None


def drop_none(**fields: object) -> dict[str, Any]:
    """Return the fields that are not `None`."""
    return {name: value for name, value in fields.items() if value is not None}
