"""Errors of pydantic in words that say what was given and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST = 60
"""Characters of a given value that are repeated."""

BOUNDS = {
    "greater_than_equal": ("too small: at least", "ge"),
    "greater_than": ("too small: more than", "gt"),
    "less_than_equal": ("too large: at most", "le"),
    "less_than": ("too large: less than", "lt"),
}
FORMS = {r"^(cpu|cuda(:\d{1,3})?)$": "cpu, cuda or cuda:N"}
"""Patterns of fields, and what they accept."""

OTHER_NAMES = {
    "zero3": "fully_shard", "fsdp": "fully_shard", "fsdp2": "fully_shard", "ddp": "replicate",
}  # fmt: skip
"""What is called otherwise elsewhere, by names that are not similar."""

UNION_MEMBER = re.compile(r"constrained-\w+|literal\[.*\]")
"""What pydantic adds to the location of an error for each alternative of a field's type."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}


def describe_violations(
    items: Sequence[Mapping[str, Any]],
) -> list[tuple[tuple[int | str, ...], str]]:
    """Describe all entries of ``ValidationError.errors()``, once for each location."""
    found: dict[tuple[int | str, ...], str] = {}
    for item in items:
        location, told = tuple(item["loc"]), describe_violation(item)
        if location and UNION_MEMBER.fullmatch(str(location[-1])):
            location = location[:-1]
            if location in found and item["type"] == "literal_error":
                told = f"or {item['ctx']['expected']}"
        found[location] = f"{found[location]}, {told}" if location in found else told
    return list(found.items())


def describe_violation(item: Mapping[str, Any]) -> str:
    """Describe an entry of ``ValidationError.errors()``."""
    kind, given = str(item["type"]), item.get("input")
    shown = _show(given) if "input" in item else "it"  # left out where it may be a secret
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known here"
    if kind == "literal_error":
        return _none_of(given, shown, str(item["ctx"]["expected"]))
    if kind == "string_pattern_mismatch" and item["ctx"]["pattern"] in FORMS:
        return f"{shown} is none of {FORMS[item['ctx']['pattern']]}"
    if kind in BOUNDS:
        words, name = BOUNDS[kind]
        return f"{shown} is {words} {item['ctx'][name]}"
    wanted = KINDS.get(kind.rpartition("_")[0])
    if wanted is not None and kind.endswith(("_type", "_parsing")):
        return f"{shown} is not {wanted}"
    # A validator's own message; pydantic puts a prefix before that of every ValueError.
    return str(item["msg"]).removeprefix("Value error, ").replace("Input should", "it should")


def _none_of(given: object, shown: str, expected: str) -> str:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    other = OTHER_NAMES.get(str(given).lower())
    near = [other] if other in choices else get_close_matches(str(given), choices, n=1, cutoff=0.5)
    nearest = f"; did you mean {near[0]!r}?" if near else ""
    if str(given) in choices:  # a number as text, which looks like the choice itself
        nearest = "; write it without quotes" if isinstance(given, str) else "; write it in quotes"
    return f"{shown} is none of {expected}{nearest}"


def _show(given: object) -> str:
    text = repr(given)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
