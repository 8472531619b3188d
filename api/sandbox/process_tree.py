"""A child and everything it started: what they keep in memory, and their end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

COUNTED = (b"RssAnon:", b"RssShmem:")
"""Of ``/proc/PID/status``; mapped files can be had again and do not count."""


def descendants(pid: int) -> list[int]:
    """A process and all below it, itself first; empty where the kernel does not tell."""
    found = [pid]
    for parent in found:  # grows while it is read
        for task in _tasks(parent):
            with suppress(OSError, ValueError):
                found += map(int, (task / "children").read_text().split())
    return found


def memory_bytes(pids: list[int]) -> int:
    """Memory of processes together, without files they only map."""
    return sum(map(_kept_bytes, pids))


def end_all(pid: int) -> None:
    """Kill a process, its group and all it started; safe to call when they are gone."""
    for member in reversed(descendants(pid)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _tasks(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _kept_bytes(pid: int) -> int:
    kept = 0
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        for line in status:
            if line.startswith(COUNTED):
                kept += 1024 * int(line.split()[1])
    return kept
