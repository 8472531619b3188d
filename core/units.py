"""Formatting of seconds, bytes, counts and types for people."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any


def format_bytes(size_bytes: float) -> str:
    """Format a size, e.g. ``1.5 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def format_time(time_s: float) -> str:
    """Format a duration, e.g. ``12.3 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        value = time_s * factor
        if abs(value) >= 1 or unit == "us":
            break
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"


def format_rate(rate: float) -> str:
    """Format a rate with four digits and thousands separators: ``12.35``, ``64,980``."""
    return f"{Decimal(f'{rate:.4g}'):,f}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun, e.g. ``1 stage``, ``8 micro-batches``."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{plural * (number != 1)}"


def list_some(names: Sequence[str], most: int) -> str:
    """Join the first names and count the others, e.g. ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_type(value: Any) -> str:
    """Name the type of an object with its article, e.g. ``an int``, ``a Linear``."""
    name = type(value).__name__
    # Letters that are spelled with a vowel in front, as in LSTM, and words in U like "unfold".
    is_spelled = name[:2].isupper() and name[0] in "FHLMNRSX"
    is_an = name[0] in "AEIOaeio" or is_spelled or name.startswith(("Un", "Up"))
    return f"{'an' if is_an else 'a'} {name}"
