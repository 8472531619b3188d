"""Suggestions for unknown fields of a body, from the body's schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from fastapi import Request
from pydantic import TypeAdapter

from .field_errors import DISCRIMINATORS

REF = "#/$defs/"

CODE_IS_NOT_RUN = (
    "this service runs no code that it is sent: capture the model where its code is ('stagewright "
    "capture', or the Python client), and send the graph, or its .pt2 file to /v1/graphs/pt2"
)

Schema = Mapping[str, Any]


def suggest_field(request: Request, pointer: str, body: object) -> str:
    """Return a suggestion for an unknown field, as the end of a sentence.

    Args:
        request: Its route declares the body's type.
        pointer: JSON pointer to the field.
        body: The parsed body, which selects among the members of unions.
    """
    whole = _schema(request.scope["route"].body_field.field_info.annotation)
    schemas = whole.get("$defs", {})
    *parents, name = [_unescaped(part) for part in pointer.split("/")[1:]] or [""]
    found = list(_forms(whole, body, schemas))
    # Earlier releases could run a "code" beside their models; its sender needs the way out.
    if pointer == "/code" and "factory" in whole.get("properties", {}):
        return CODE_IS_NOT_RUN
    for parent in parents:
        body = _part(body, parent)
        found = [form for schema in found for form in _below(schema, parent, body, schemas)]
    return suggest_name(name, {field for schema in found for field in schema.get("properties", {})})


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
