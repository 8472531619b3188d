"""Requests as they are written: paths, parameters, bodies, idempotency keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel

from ..core.errors import InvalidInput
from .sans_io import Call

JSON_TYPE = "application/json"


def get(*path: str, **params: object) -> Call:
    """Read something; parameters that are `None` are left out."""
    given = {name: str(value) for name, value in params.items() if value is not None}
    return Call("GET", path_of(*path), given)


def create(
    *path: str, fields: object, fresh: bool = False, headers: Mapping[str, str] | None = None
) -> Call:
    """Make something, at most once however often it is sent: the call has a key of its own.

    Args:
        path: Below ``/v1``.
        fields: The body.
        fresh: Have everything found out again, whatever the service knows.
        headers: More of them.
    """
    freshly = {"Cache-Control": "no-cache"} if fresh else {}
    return _post(path, fields, {"Idempotency-Key": uuid4().hex, **freshly, **(headers or {})})


def ask(*path: str, fields: object) -> Call:
    """Post a question: nothing is made."""
    return _post(path, fields, {})


def upload(*path: str, content: bytes) -> Call:
    """Make something out of a file."""
    headers = {"Content-Type": "application/octet-stream", "Idempotency-Key": uuid4().hex}
    return Call("POST", path_of(*path), headers=headers, body=content)


def _post(path: tuple[str, ...], fields: object, headers: Mapping[str, str]) -> Call:
    return Call(
        "POST",
        path_of(*path),
        headers={"Content-Type": JSON_TYPE, **headers},
        body=json_bytes(fields),
    )


def path_of(*parts: str) -> str:
    """A path below ``/v1``.

    Raises:
        InvalidInput: A part is empty, which would name something else.
    """
    if not all(parts):
        raise InvalidInput("an id is empty; give that of a stored plan, profile, graph, job or key")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def plain(value: Any) -> Any:
    """Records as JSON has them."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return value


def json_bytes(fields: object) -> bytes:
    """Fields as JSON.

    Raises:
        InvalidInput: JSON has no such value.
    """
    try:
        return json.dumps(fields, allow_nan=False, default=plain).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"this cannot be sent as JSON: {error}") from None


def given(**fields: object) -> dict[str, Any]:
    """The fields that are not `None`."""
    return {name: value for name, value in fields.items() if value is not None}
