"""Keep other cores busy while measuring, as the other ranks of a pipeline will.

Ranks that share a machine share its memory bandwidth and caches. A profile taken on an idle
machine is then too optimistic; one taken beside neighbours that work as hard is not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

START_TIMEOUT_S = 120.0


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """``count`` single-threaded processes doing layer-like work until the block ends."""
    command = [sys.executable, "-m", "stagewright.profiler.machine.contention_worker"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it says so when it is warm
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
