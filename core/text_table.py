"""Aligned plain-text tables, for people and for ``grep``."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows with a rule under the first; columns are as wide as their widest cell."""
    # Names come from models and files: line breaks and escape sequences must not reach a terminal.
    rows = [[sanitize(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


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
