"""pydantic's list of errors as JSON pointers into the body and sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.document import json_pointer
from ...core.errors import InvalidInput
from ...core.service.problems import FieldError as FieldError

DISCRIMINATORS = ("family", "kind")
"""Fields that tell the members of tagged unions apart (`core.families`, `core.state_tensors`)."""

MAX_ERRORS = 50
MAX_CHARACTERS = 500


def clip(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text, cut where a request made it too long to repeat."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def field_errors(items: Sequence[Mapping[str, Any]], body: object) -> list[FieldError]:
    """The first `MAX_ERRORS` errors of a validation.

    Args:
        items: What ``ValidationError.errors()`` returns, each location opened by where the value
            came from: ``body``, ``query``, ``path``.
        body: The body as read.
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
    return FieldError(pointer=clip(json_pointer(tuple(path)) + inner), detail=clip(_sentence(item)))


def _path_in(
    body: object, location: Sequence[int | str], *, is_missing: bool = False
) -> list[int | str]:
    """The location without what pydantic adds to it: members of unions, and a mark for bad keys."""
    path: list[int | str] = []
    here, behind_tag = body, False
    for position, part in enumerate(location):
        is_tag = isinstance(here, dict) and part in [here.get(name) for name in DISCRIMINATORS]
        if is_tag and not behind_tag:
            behind_tag = True
            continue
        behind_tag = False
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
            return f"this names its {_discriminator(item)}"
        case _:
            cause = _cause(item)
            return str(cause) if cause is not None else str(item["msg"])


def _cause(item: Mapping[str, Any]) -> Exception | None:
    """The error a validator of ours raised, if one did."""
    cause = item.get("ctx", {}).get("error")
    return cause if isinstance(cause, Exception) else None
