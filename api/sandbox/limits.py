"""How much a child may take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SHARE_OF_MEMORY = 0.75
"""Of the machine's memory, for all a child and what it starts keep; the server needs the rest."""

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container reads its own limit, of cgroup v2 and v1."""


@dataclass(frozen=True)
class ChildLimits:
    """Of one child with everything it starts.

    Attributes:
        memory_bytes: Memory of its own and shared memory; files it only maps do not count.
        deadline_s: Longest it may take.
        output_bytes: Longest answer.
    """

    memory_bytes: int
    deadline_s: float
    output_bytes: int = 64 * 2**20


def default_memory_bytes() -> int:
    """What a child may keep where nobody said: `SHARE_OF_MEMORY` of what this machine has."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(SHARE_OF_MEMORY * min([installed, *map(_limit, CGROUP_LIMITS)]))


def _limit(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # none, or "max"
        return 2**62
