"""JSON bodies: parsed strictly, and limited in what they become before they are validated.

pydantic reports every unknown member and every invalid item: a million of them, in 11 MiB, took
1.7 GB and 6 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from ...core.document import json_pointer
from .field_errors import FieldError, Schema, clip, forms_at, suggest_name
from .problems import Problem

MAX_NODES = 2 * 2**20
"""Values of a body. The largest documents accepted have 1.2 million; in memory each takes up to
100 bytes."""

OBJECT_NODES = 3
"""Values that an object counts as: it takes some 500 bytes once it is validated."""

MAX_MEMBERS = 2**15
"""Members of an object with any names. The labels of a ``config.json`` may be 21,841."""

MANY = 100
"""Members or items that are left to validation, which reports all that are wrong."""

ARCHIVE_TYPES = ("application/octet-stream", "application/zip")
ARCHIVE_START = b"PK\x03\x04"  # of a form's file, it is not at the very start

CAPTURE_INSTEAD = (
    " A .pt2 file is not read here: capture it where torch is, 'stagewright capture model.pt2 -o "
    "graph.json', and send graph.json. The Python client does both by itself."
)

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')


def explain_archive(content_type: str, body: bytes = b"") -> str:
    """Return what to do instead, as another sentence, if a refused body may be a ``.pt2`` file."""
    named = content_type.partition(";")[0].strip().lower() in ARCHIVE_TYPES
    return CAPTURE_INSTEAD if named or ARCHIVE_START in body[:1024] else ""


def parse_json(body: bytes, kind: Any = None) -> Any:
    """Parse a body whose members have names of their own; ``kind`` is the type it should have.

    Raises: Problem, also for an object or a list with more than the type accepts.
    """
    # Before parsing: a comma or a bracket for each value, and a few in texts.
    num_nodes = sum(map(body.count, (b",", b"["))) + OBJECT_NODES * body.count(b"{")
    if num_nodes > MAX_NODES:
        raise Problem(
            413,
            "body-too-large",
            f"A request body may have some {MAX_NODES} values, objects counted {OBJECT_NODES} "
            f"times, and this one has {num_nodes}. Send a smaller document.",
        )
    try:
        # This parser limits the depth and refuses lone surrogates; NaN has to be forbidden.
        found = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        archive = explain_archive("", body)
        raise Problem(
            400, "malformed-json", f"The body is not valid JSON: {error}.{archive}"
        ) from None
    in_texts = sum(text[0].count(b":") for text in _TEXT.finditer(body))
    if _count_members(found, kind) != body.count(b":") - in_texts:
        del found  # the other parser is slow, and makes it a second time
        json.loads(body, object_pairs_hook=_refuse_repeated)
        raise AssertionError("a body with fewer members than colons repeats one")
    return found


def _count_members(found: Any, kind: Any) -> int:
    """Return the number of all members of a body, whose large parts its type has to accept."""
    num_members, place = 0, []
    levels: list[Iterator[tuple[Any, Any]]] = [iter([("", found)])]
    while levels:
        for name, here in levels[-1]:
            if isinstance(here, dict | list):
                place.append(name)
                break
        else:
            levels.pop()
            del place[-1:]
            continue
        if len(here) > MANY:
            _check_size(here, kind, found, place[1:])
        num_members += len(here) if isinstance(here, dict) else 0
        levels.append(iter(here.items() if isinstance(here, dict) else enumerate(here)))
    return num_members


def _check_size(
    here: dict[str, Any] | list[Any], kind: Any, body: Any, place: Sequence[str | int]
) -> None:
    """Refuse an object or a list with more than its schema accepts. Raises: Problem."""
    forms = [{}] if kind is None else forms_at(kind, body, [str(name) for name in place])
    accepted = (None, "array" if isinstance(here, list) else "object")
    forms = [form for form in forms if form.get("type") in accepted]
    if isinstance(here, list):
        limits = [form.get("maxItems", MAX_NODES) for form in forms]
        told = "items"
    else:
        known = {name for form in forms for name in form.get("properties", ())}
        unknown = next((name for name in here if name not in known), "")
        limits = [_most_members(form) for form in forms]
        told = f"members, such as {clip(unknown)!r}; {suggest_name(unknown, known)}"
    if len(here) > (most := max(limits, default=MAX_MEMBERS)):
        pointer = clip(json_pointer(tuple(place)))
        detail = f"at most {most} are accepted here, not {len(here)} {told}"
        errors = [FieldError(pointer=pointer, detail=detail)]
        raise Problem(422, "invalid-input", f"{pointer or 'the body'}: {detail}", errors=errors)


def _most_members(form: Schema) -> int:
    most: int = form.get("maxProperties", MAX_MEMBERS)
    further = form.get("additionalProperties", form.get("type") != "object")
    if further is False:
        return MANY + len(form.get("properties", ()))
    return most if further is True else min(most, 10 * MANY)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object. Raises: Problem, if two have one name."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise Problem(
                400,
                "malformed-json",
                f"The member {clip(name)!r} is in the same object twice. Send each once.",
            )
        members[name] = value
    return members
