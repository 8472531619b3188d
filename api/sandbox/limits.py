"""Limits on a child process."""

from __future__ import annotations

import os
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
