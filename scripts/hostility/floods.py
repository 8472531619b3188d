"""A million members or items at every place of every body that the service reads.

Where a place accepts fewer, also as many as it accepts, each of them wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from stagewright.api.app import ROUTERS
from stagewright.api.http.json_bodies import MAX_MEMBERS

from .attack import Attack, Reply, Target

NUM = 10**6

WRONG = '{"k":[]}'
"""What no place accepts as its items."""

Schema = Mapping[str, Any]
Wrap = Callable[[str], str]
"""Puts a text into the body around it."""


def attacks() -> Iterator[Attack]:
    seen: set[str] = set()
    for path, kind in body_types():
        for place, body in floods(kind, NUM, seen):
            yield Attack("flood", f"{path}{place}", _sending(path, body))


def _sending(path: str, body: Callable[[], str]) -> Callable[[Target], Reply]:
    method = "PATCH" if "{" in path else "POST"
    return lambda target: target.ask(method, path, body().encode())


def body_types() -> list[tuple[str, Any]]:
    """Return the path and the type of the body of each route that reads one."""
    return [
        (route.path, route.body_field.field_info.annotation)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.body_field is not None
    ]


def floods(
    kind: Any, num: int, seen: set[str] | None = None
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield bodies of a type, each with so many members or items at one place, by that place.

    Each named schema is flooded once; names in ``seen`` are left out and added.
    """
    whole = TypeAdapter(kind).json_schema()
    names = set() if seen is None else seen
    yield from _below(whole, whole.get("$defs", {}), "", lambda inner: inner, num, names)


def _below(
    schema: Schema, schemas: Schema, place: str, wrap: Wrap, num: int, seen: set[str]
) -> Iterator[tuple[str, Callable[[], str]]]:
    if (name := schema.get("$ref")) is not None:
        if name not in seen:
            seen.add(name)
            called = name.split("/")[-1]  # distinguishes the choices at one place
            yield from _below(schemas[called], schemas, f"{place}:{called}", wrap, num, seen)
        return
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _below(choice, schemas, place, wrap, num, seen)
    if schema.get("type") == "array":
        yield f"{place}[]", lambda: wrap(f"[{','.join(['{}'] * num)}]")
        if (most := schema.get("maxItems", num)) < num:
            yield f"{place}[{most}]", lambda: wrap(f"[{','.join([WRONG] * most)}]")
        if (items := schema.get("items")) is not None:
            yield from _below(items, schemas, f"{place}/0", _within(wrap, "[", "]"), num, seen)
    if schema.get("type") != "object":
        return
    parts = schema.get("properties", {})
    # Tags, without which a union does not know its member.
    tags = {tag: one["const"] for tag, one in parts.items() if "const" in one}
    members = "{" + "".join(f'"{tag}":{json.dumps(value)},' for tag, value in tags.items())
    yield f"{place}{{}}", lambda: wrap(members + _many(num, "0"))
    if isinstance(schema.get("additionalProperties", {}), dict):
        most = min(schema.get("maxProperties", MAX_MEMBERS), MAX_MEMBERS)
        yield f"{place}{{{most}}}", lambda: wrap(members + _many(most, WRONG))
    free = schema.get("additionalProperties")
    further = {"k": free} if isinstance(free, dict) else {}
    for name, part in {**parts, **further}.items():
        inner = _within(wrap, f'{members}"{name}":', "}")
        yield from _below(part, schemas, f"{place}/{name}", inner, num, seen)


def _many(num: int, value: str) -> str:
    return ",".join(f'"k{n}":{value}' for n in range(num)) + "}"


def _within(wrap: Wrap, before: str, after: str) -> Wrap:
    return lambda inner: wrap(f"{before}{inner}{after}")
