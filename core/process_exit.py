"""How a child process ended, in words; lack of memory only where the system says so."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

EVENTS = Path("/proc/vmstat")
"""Counters of Linux, one of them of processes that it killed for lack of memory."""


def count_memory_kills() -> int:
    """Return how many processes the system has killed for lack of memory; 0 if it does not say."""
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", EVENTS.read_text(encoding="utf-8"), re.M):
            return int(found[1])
    return 0


def describe_exit(code: int, kills_before: int) -> str:
    """Return how a process ended, to follow its name: ``was ended by SIGKILL (signal 9)``.

    Args:
        code: Its exit code: the negative number of a signal, or by a shell's convention 128 more.
        kills_before: `count_memory_kills` when the process started.
    """
    number = -code if code < 0 else code - 128
    if number not in {*signal.Signals}:
        return f"ended with exit code {code}"
    if number == signal.SIGKILL and count_memory_kills() > kills_before:
        return "was killed by the system for lack of memory"
    return f"was ended by {signal.Signals(number).name} (signal {number})"
