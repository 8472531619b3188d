"""Limits on a child process and its descendants: what they use, and how they are ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARE_OF_MEMORY = 0.75
"""Share of the machine's memory for a child and its descendants; the server needs the rest."""

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Memory limit of this container, in cgroup v2 and v1."""


@dataclass(frozen=True)
class ChildLimits:
    """Limits on one child and its descendants together.

    Attributes:
        memory_bytes: Anonymous and shared memory; mapped files do not count.
        deadline_s: Time limit.
        output_bytes: Size limit of the answer.
    """

    memory_bytes: int
    deadline_s: float
    output_bytes: int = 64 * 2**20


def default_memory_bytes() -> int:
    """Return `SHARE_OF_MEMORY` of this machine's or container's memory."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(SHARE_OF_MEMORY * min([installed, *map(_limit, CGROUP_LIMITS)]))


def _limit(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # none, or "max"
        return 2**62


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
