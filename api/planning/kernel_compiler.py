"""Having the planner's inner loops compiled, once for an installation."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
import threading

from ...planner import numba_cache as compiling

COMMAND = (
    sys.executable,
    "-c",
    f"import os; os.nice(14); from {compiling.__name__} import compile_all; compile_all()",
)
"""It comes after everything else: plans are found without it, too."""

_log = logging.getLogger(__name__)


class Compiler:
    """Compiles in a process of its own, if that is still to be done.

    It takes half a minute. What is small is planned in plain Python until then.

    Attributes:
        done: Set once all is compiled, or cannot be. Processes that were spawned see it, too.
    """

    def __init__(self) -> None:
        self.done = multiprocessing.get_context("spawn").Event()
        self._process: subprocess.Popen[bytes] | None = None
        if compiling.is_done():
            self.done.set()
            return
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._wait, args=(self._process,), daemon=True).start()

    def close(self) -> None:
        """End it, done or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() > 0:
            _log.warning("the planner's loops could not be compiled: plans take longer")
        self.done.set()
