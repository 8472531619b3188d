"""Memory use and termination of a process and its descendants."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

COUNTED = (b"RssAnon:", b"RssShmem:")
"""Lines of ``/proc/PID/status``; mapped files can be read again and do not count."""


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants, itself first; dead ones may be missing."""
    found = [pid]
    for parent in found:  # the list grows during the iteration
        for task in _tasks(parent):
            with suppress(OSError, ValueError):
                found += map(int, (task / "children").read_text().split())
    return found


def memory_bytes(pids: list[int]) -> int:
    """Return the memory of all processes together, without mapped files."""
    return sum(map(_kept_bytes, pids))


def end_all(pid: int) -> None:
    """Kill a process, its group and its descendants; safe to call when they are gone."""
    # Deepest first: a parent that is still alive keeps its children findable, and the launcher,
    # a subreaper, adopts those whose parent has died.
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
