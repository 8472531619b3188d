"""Child processes that end when their owner ends, even if the owner is killed.

A process group does not achieve this: torchrun starts every rank in a separate session, and
SIGKILL leaves the owner no time to clean up. Instead all descendants inherit, as standard input,
a pipe that the owner holds open and never writes to. The kernel closes it when the owner ends;
the ranks read end-of-file and exit, and torchrun exits once its ranks are gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

TERMINATE_TIMEOUT_S = 10.0
"""Time for a launcher to stop its ranks after SIGTERM, before the whole group is killed."""

ABANDONED = 9
"""Exit code of a rank whose owner is gone; no process is left to read it."""


@contextlib.contextmanager
def owned_process(
    command: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a process that, with all its descendants, ends with the block or with this process.

    Its standard output is discarded, its standard error is a pipe. Do not call `communicate`,
    which would close its standard input.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process, _signals_end_this_process():
        try:
            yield process
        finally:
            _stop(process)


def end_with_owner(folder: Path) -> None:
    """Exit, and delete the folder, when the owner that started this `owned_process` is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        # The owner's temporary folder: a killed owner could not delete it.
        shutil.rmtree(folder, ignore_errors=True)
        # Not sys.exit: the main thread may be blocked in a collective that never returns.
        os._exit(ABANDONED)

    threading.Thread(target=wait, name="owner", daemon=True).start()


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    # SIGTERM lets torchrun stop its ranks; closing the pipe ends those that do not listen, and
    # SIGKILL to the session, which torchrun itself leads, whatever is left there.
    if process.poll() is None:
        process.terminate()
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERMINATE_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _signals_end_this_process() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that context managers clean up."""
    # Python installs signal handlers from the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
