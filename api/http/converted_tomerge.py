"""Values that were taken for another type than they have.

pydantic takes ``true`` and ``"1"`` for the number 1, and ``"yes"`` for true; the documented schema
of a body does not. Its own strict mode would refuse lists for tuples, too.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Kind = Literal["number", "boolean"]
Place = tuple[str | int, ...]

PLAIN = frozenset({int, float, str, bool, type(None)})


def converted(value: Any, found: Any) -> list[tuple[Place, Kind]]:
    """Where a number or a boolean was something else, and what it is now.

    Args:
        value: As validated.
        found: The JSON it was made from.
    """
    if isinstance(value, bool):
        return [] if isinstance(found, bool) else [((), "boolean")]
    if isinstance(value, int | float):
        return [((), "number")] if isinstance(found, bool | str) else []
    places: list[tuple[Place, Kind]] = []
    for key, inner, was in _pairs(value, found):
        if type(inner) is type(was) and type(was) in PLAIN:
            continue
        places += [((key, *place), kind) for place, kind in converted(inner, was)]
    return places


def _pairs(value: Any, found: Any) -> list[tuple[str | int, Any, Any]]:
    """What is inside, each with what it was made from."""
    if isinstance(value, BaseModel) and isinstance(found, dict):
        fields = type(value).model_fields.items()
        named = [(field.alias or name, name) for name, field in fields]
        return [(key, getattr(value, name), found[key]) for key, name in named if key in found]
    if isinstance(value, dict) and isinstance(found, dict):
        return [(key, value[key], was) for key, was in found.items() if key in value]
    if isinstance(value, tuple | list) and isinstance(found, list) and len(value) == len(found):
        return [(index, *both) for index, both in enumerate(zip(value, found, strict=True))]
    return []
