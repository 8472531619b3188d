"""Rows as aligned plain text, for people and for ``grep``."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, a rule under the first row.

    What would break the lines, or steer a terminal, is shown escaped: names come from anywhere.
    """
    rows = [[sanitize(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def sanitize(text: str) -> str:
    """The text with line ends and control characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def truncate(text: str, most: int) -> str:
    """The text, or its beginning if it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."
