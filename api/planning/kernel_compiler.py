"""Compilation of the planner's kernels, in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
import threading

from ...planner import numba_cache

COMMAND = (
    sys.executable,
    "-c",
    f"import os; os.nice(14); from {numba_cache.__name__} import compile_all; compile_all()",
)
"""Niced below everything else: plans are found without the kernels, too."""

_log = logging.getLogger(__name__)


class KernelCompiler:
    """Process that compiles the kernels, if that is still to be done.

    It takes half a minute; then ``done``, which solver processes share, is 1. Until then, and if it
    fails, they plan in plain Python: each would fail in the same way, or compile for itself.
    """

    def __init__(self) -> None:
        # Shared memory without a lock: one that a killed process held would stop all others.
        self.done = multiprocessing.get_context("spawn").RawValue("b", 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        if numba_cache.is_done():
            self.done.value = 1
            return
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()

    def close(self) -> None:
        """Kill the process if it still runs."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self.done.value = code == 0
        if code and not self._is_closed:
            _log.warning("the planner's kernels could not be compiled: planning takes longer")
