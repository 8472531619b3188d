"""A search that takes a while, importable where plans are searched for."""

from __future__ import annotations

import os
import time
from typing import Any

from stagewright.api.planning.decision import decide
from stagewright.api.planning.solver_process import report_best
from stagewright.planner.problem.problem import Progress

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


def take_all_of(duration_s: float, _: float) -> tuple[int, int]:
    """Take that long; return the process and its niceness at the end."""
    time.sleep(duration_s)
    return os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)


def sleep_through(duration_s: float, seconds: float) -> float:
    """Sleep for a duration, whatever the time that was given; return that."""
    time.sleep(duration_s)
    return seconds


def overrun(*_: Any) -> Any:
    """Search without a look at the deadline."""
    time.sleep(20.0)


def report(value: float, lower_bound: float, seconds: float) -> float:
    """Report a plan of that value unless it is 0, and take a second."""
    if value:
        report_best(Progress(0.0, value, lower_bound))
    time.sleep(min(seconds, 1.0))
    return seconds
