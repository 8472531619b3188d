"""Validation errors of pydantic as JSON pointers into the body, each with a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.document import json_pointer
from ...core.errors import InvalidInput
from ...core.service.problems import FieldError as FieldError

DISCRIMINATORS = ("family", "kind")
"""Discriminators of the tagged unions of `core`."""

MAX_ERRORS = 50
MAX_CHARACTERS = 500


def clip(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text cut to ``limit`` characters: requests can make messages any length."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def field_errors(items: Sequence[Mapping[str, Any]], body: object) -> list[FieldError]:
    """Return the first `MAX_ERRORS` errors of a validation.

    Args:
        items: From ``ValidationError.errors()``; each location begins with the part of the
            request: ``body``, ``query``, ``path``.
        body: The parsed body.
    """
    return [_field_error(item, body) for item in items[:MAX_ERRORS]]


def _field_error(item: Mapping[str, Any], body: object) -> FieldError:
    where, *location = item["loc"]
    if where != "body":
        return FieldError(parameter=clip(str(location[-1])), detail=clip(_sentence(item)))
    path = _path_in(body, location, is_missing=item["type"] == "missing")
    if item["type"].startswith("union_tag_"):
        path.append(_discriminator(item))
    cause = _cause(item)
    inner = cause.field or "" if isinstance(cause, InvalidInput) else ""
    if isinstance(item.get("input"), str):  # e.g. a cluster in shorthand: text has no fields
        inner = ""
    return FieldError(pointer=clip(json_pointer(tuple(path)) + inner), detail=clip(_sentence(item)))


def _path_in(
    body: object, location: Sequence[int | str], *, is_missing: bool = False
) -> list[int | str]:
    """Return the location without the parts that pydantic adds: union members and key marks."""
    path: list[int | str] = []
    here, behind_tag = body, False
    for position, part in enumerate(location):
        # pydantic puts a union's tag before the field's name. A field may be called like a tag,
        # so only the first of two matching parts is dropped.
        is_tag = isinstance(here, dict) and part in [here.get(name) for name in DISCRIMINATORS]
        if is_tag and not behind_tag:
            behind_tag = True
            continue
        behind_tag = False
        # What the body does not have at this place is pydantic's own, the name of a union's member.
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif isinstance(here, list) and part in range(len(here)):
            here = here[int(part)]
        elif not (is_missing and isinstance(here, dict) and position == len(location) - 1):
            continue
        path.append(part)
    return path


def _discriminator(item: Mapping[str, Any]) -> str:
    return str(item.get("ctx", {}).get("discriminator", DISCRIMINATORS[0])).strip("'")


def _sentence(item: Mapping[str, Any]) -> str:
    context = item.get("ctx", {})
    match item["type"]:
        case "missing":
            return "this field is required"
        case "extra_forbidden":
            return f"unknown field {clip(repr(item['loc'][-1]))}"
        case "union_tag_invalid":
            tag = clip(repr(context["tag"]))
            return f"unknown {_discriminator(item)} {tag}; known are {context['expected_tags']}"
        case "union_tag_not_found":
            return f"required: {_discriminator(item)} selects the kind"
        case _:
            cause = _cause(item)
            return str(cause) if cause is not None else str(item["msg"])


def _cause(item: Mapping[str, Any]) -> Exception | None:
    """Return the error that one of our validators raised, if any."""
    cause = item.get("ctx", {}).get("error")
    return cause if isinstance(cause, Exception) else None
