"""How long a caller waits for an answer (RFC 7240)."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header

DEFAULT_WAIT_S = 60.0
"""For a request that says nothing."""

SLACK_S = 5.0
"""Beyond the longest measurement: until its end is written down."""

APPLIED = "Preference-Applied"

Prefer = Annotated[
    list[str] | None,
    Header(
        description="`wait=N`: answer after N seconds at most, with the job if it has not ended; "
        "`respond-async`: with the job at once.",
    ),
]


def wait_of(prefer: list[str] | None, longest_s: float) -> tuple[float, str | None]:
    """Seconds to wait, and what to say of it; preferences that make no sense count for nothing.

    Args:
        prefer: Every ``Prefer`` header.
        longest_s: Nobody waits longer.
    """
    longest_s = longest_s + SLACK_S
    preferences = [part.strip().lower() for line in prefer or () for part in line.split(",")]
    for preference in preferences:
        match = re.fullmatch(r'wait\s*=\s*"?(\d{1,9})"?', preference)
        if match:
            seconds = min(float(match[1]), longest_s)
            return seconds, f"wait={seconds:g}"
    if "respond-async" in preferences:
        return 0.0, "respond-async"
    return min(DEFAULT_WAIT_S, longest_s), None
