"""A child process with a time limit, and what it said last."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KEPT_LINES = 15
"""Last lines of its standard error that are kept."""

NOISE = ("USDT:",)
"""Beginnings of lines that torch's own profiler writes whenever it is used."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, `None` if it was killed at its limit."""

    code: int | None
    elapsed_s: float
    last_lines: list[str]


def run_child(
    command: Sequence[str], limit_s: float, folder: Path, environment: dict[str, str] | None = None
) -> Ended:
    """Run a command in a process group of its own, none of which outlives it or its limit."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            env=environment, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:  # also on Ctrl-C, and for ranks that a child left behind
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elapsed_s = time.monotonic() - start
        said.seek(0)
        lines = [line.rstrip() for line in said if line.strip() and not line.startswith(NOISE)]
    return Ended(code, elapsed_s, lines[-KEPT_LINES:])
