"""Aligned plain-text tables, for people and for ``grep``."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?[^\W\d]{1,3}| ?%)?|none|")
"""A number, perhaps with its unit, or that there is none."""


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows with a rule under the first, columns of numbers aligned to the right."""
    # Names come from models and files: line breaks and escape sequences must not reach a terminal.
    rows = [[sanitize(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [
        str.rjust if is_numeric(column[1:]) else str.ljust for column in zip(*rows, strict=True)
    ]
    lines = [
        "  ".join(
            put(cell, width) for put, cell, width in zip(justify, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def is_numeric(cells: Sequence[str]) -> bool:
    """Return True if a column's cells are numbers, with units or without, or empty."""
    return any(cells) and all(NUMBER.fullmatch(cell) for cell in cells)


def sanitize(text: str) -> str:
    """Escape line ends and control characters."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def truncate(text: str, most: int) -> str:
    """Shorten a text to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."
