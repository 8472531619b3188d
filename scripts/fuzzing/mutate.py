"""A JSON document with a few of its values changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

ODD = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30,
    0.0, -0.0, 1e-300, 0.1, 1.5, 1e18, 1e300, "", "0", "1", "x", "cpu", "2x24GB", "8xH100",
    "1x1B", "0x24GB", "\u0000", "\ud7ff\uffff", "\U0001f600", "a" * 300, "../../etc/passwd",
    "../", "${x}", [], {}, [[]], [None], [0], {"": None}, {"family": "mlp"},
)  # fmt: skip
"""Edges: of numbers in Python, JSON and databases, of text, and other types than asked for."""


def changed(document: Any, random: Random, stored: Mapping[str, Sequence[str]]) -> Any:
    """Return a copy with up to three changes.

    Args:
        document: Is left as it is.
        random: Decides.
        stored: Ids that may be put in, by the field's name.
    """
    found = copy.deepcopy(document)
    for path in list(_paths(found)):
        known = stored.get(str(path[-1]) if path else "")
        if known and random.random() < 0.7:
            _put(found, path, random.choice(known))
    for _ in range(random.randrange(4)):
        paths = [path for path in _paths(found) if path]
        if paths:
            _change(found, random.choice(paths), random)
    return found


def _change(document: Any, path: tuple[int | str, ...], random: Random) -> None:
    *_, last = path
    parent = _at(document, path[:-1])
    value = parent[last]
    match random.randrange(6):
        case 0 if isinstance(parent, list):
            parent.insert(int(last), copy.deepcopy(value))
        case 1:
            del parent[last]
        case 2 if isinstance(value, int | float) and not isinstance(value, bool):
            parent[last] = random.choice((value + 1, value - 1, value * 2, -value, value * 1000))
        case 3 if isinstance(parent, dict):
            parent[random.choice((f"{last}x", "plan_id", "profile_id", "spec"))] = value
        case _:
            parent[last] = copy.deepcopy(random.choice(ODD))


def _paths(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Yield the path of every value of a document."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, key))


def _at(document: Any, path: tuple[int | str, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def _put(document: Any, path: tuple[int | str, ...], value: Any) -> None:
    _at(document, path[:-1])[path[-1]] = value
