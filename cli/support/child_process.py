"""Processes that end when the one that started them does, however it ends.

A process group is not enough: torchrun gives every rank a session of its own, and whoever is
killed takes nobody along. So all of them inherit, as their standard input, a pipe that the owner
holds open and never writes to. The system closes it when the owner ends, and the ranks end then;
torchrun, without ranks, does as well.
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

LEAVING_S = 10.0
"""For a launcher that was told to stop, before it is killed."""

ABANDONED = 9
"""Exit code of a rank whose owner is gone; nobody reads it."""


@contextlib.contextmanager
def owned_process(
    command: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process and all it starts, none of which outlives the block or this process.

    Its standard output is dropped, its standard error is a pipe. Do not `communicate`, which
    would close its standard input.
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
    """In a process started by `owned_process`: end when the owner is gone, and its folder too."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(ABANDONED)

    threading.Thread(target=wait, name="owner", daemon=True).start()


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    if process.poll() is None:
        process.terminate()
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LEAVING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _signals_end_this_process() -> Iterator[None]:
    """Inside, what would kill this process at once is an exit that cleans up after itself."""
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
