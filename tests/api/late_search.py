"""A search that takes a while, importable where plans are searched for."""

from __future__ import annotations

import time
from typing import Any

from stagewright.api.planning.service import decide

DURATION_S = 2.0


def late(*arguments: Any) -> Any:
    time.sleep(DURATION_S)
    return decide(*arguments)


def ready() -> int:
    return 7


def take_all(seconds: float) -> float:
    """Take all the time it is given."""
    time.sleep(seconds)
    return seconds


def sleep_through(*durations_s: float) -> float:
    """Sleep for the first duration, or the last if there is more time, whatever it was given."""
    *durations, seconds = durations_s
    time.sleep(durations[0] if seconds <= 0.5 or len(durations) == 1 else durations[-1])
    return seconds if len(durations) == 1 else 0
