"""Validation errors of pydantic as JSON pointers into the body, each with a sentence.

Unknown fields come with a suggestion from the body's schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from fastapi import Request
from pydantic import TypeAdapter

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


REF = "#/$defs/"

Schema = Mapping[str, Any]


def suggest_field(request: Request, pointer: str, body: object) -> str:
    """Return a suggestion for an unknown field, as the end of a sentence."""
    kind = request.scope["route"].body_field.field_info.annotation
    *parents, name = [_unescaped(part) for part in pointer.split("/")[1:]] or [""]
    known = {
        field for form in forms_at(kind, body, parents) for field in form.get("properties", {})
    }
    return suggest_name(name, known)


def forms_at(kind: Any, body: object, place: Sequence[str]) -> list[Schema]:
    """Return the alternative schemas of a part of a body of a type, references resolved."""
    whole = _schema(kind)
    schemas = whole.get("$defs", {})
    found = list(_forms(whole, body, schemas))
    for name in place:
        body = _part(body, name)
        found = [form for schema in found for form in _below(schema, name, body, schemas)]
    return found


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, or some of the known, as the end of a sentence."""
    names = sorted(known)
    near = get_close_matches(name[:100], names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "there is none here"
    return f"known are {', '.join(names[:12])}" + (", and more" if len(names) > 12 else "")


# By type of body, of which there is one a route: a schema takes milliseconds to make.
@lru_cache(maxsize=64)
def _schema(kind: Any) -> Schema:
    return TypeAdapter(kind).json_schema()


def _below(schema: Schema, name: str, part: object, schemas: Schema) -> Iterator[Schema]:
    """Yield the schemas of a member of an object or a list."""
    inner = schema.get("properties", {}).get(name)
    if inner is None:
        inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, dict):
        yield from _forms(inner, part, schemas)


def _forms(schema: Schema, part: object, schemas: Schema) -> Iterator[Schema]:
    """Yield the alternatives of a schema, references resolved, that a value's tags allow."""
    if (ref := schema.get("$ref")) is not None:
        yield from _forms(schemas[ref.removeprefix(REF)], part, schemas)
        return
    choices: Sequence[Schema] = schema.get("anyOf") or schema.get("oneOf") or ()
    if not choices and _is_of(schema, part):
        yield schema
    for choice in choices:
        yield from _forms(choice, part, schemas)


def _is_of(schema: Schema, part: object) -> bool:
    """Return True unless an object's tags contradict the schema."""
    fields = schema.get("properties", {})
    return not isinstance(part, dict) or all(
        "const" not in fields.get(tag, {}) or part.get(tag) in (None, fields[tag]["const"])
        for tag in DISCRIMINATORS
    )


def _part(body: object, name: str) -> object:
    if isinstance(body, dict):
        return body.get(name)
    if isinstance(body, list) and name.isdecimal() and int(name) < len(body):
        return body[int(name)]
    return None


def _unescaped(part: str) -> str:
    # In this order (RFC 6901, section 4): "~01" stands for "~1" and not for "/".
    return part.replace("~1", "/").replace("~0", "~")
