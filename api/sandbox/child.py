"""Confined children, the only processes that handle what clients send."""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from ...core.errors import Cancelled, DeadlineExceeded, MeasurementError, OutOfMemory
from ...core.process_exit import count_memory_kills
from ...core.units import format_bytes
from .bubblewrap import Sandbox
from .child_messages import error_of, progress_of
from .limits import ChildLimits, descendants, end_all, memory_bytes
from .seccomp import filter_file

CHECK_S = 0.05
"""Interval at which memory, deadline and the stop event are checked."""

PROGRESS_S = 0.1
"""Shortest interval between reported progress; faster progress is dropped."""

READ_BYTES = 2**16
MAX_STDERR_BYTES = 2**16

LAUNCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")))

OnProgress = Callable[[dict[str, Any]], None]


def run_confined(
    command: Sequence[str],
    request: bytes,
    limits: ChildLimits,
    *,
    sandbox: Sandbox | None = None,
    on_progress: OnProgress | None = None,
    stopped: threading.Event | None = None,
) -> bytes:
    """Run a command on a request in a confined child and return its output.

    The child sees only a few environment variables, none of them secret, and dies with the calling
    thread. Whatever happens, it and all its descendants are killed before this returns.

    Args:
        command: The program; it reads the request on standard input, answers on standard output
            and writes progress and errors to standard error as
            `profiler.worker_protocol` says.
        request: The child's standard input.
        limits: Limits on the child. Memory is checked 20 times a second and may be exceeded in
            between.
        sandbox: Removes the network and all files but those Python needs to read.
        on_progress: Called in this thread with ``done``, ``total``, ``layer``.
        stopped: Ends the child when set.

    Raises:
        InvalidInput, CaptureError, MeasurementError: Reported by the child, or it ended silently.
        OutOfMemory: It exceeded its memory; the error names the layer it last reported, the
            memory it had and the limit.
        DeadlineExceeded: It did not finish in time.
        Cancelled: ``stopped`` was set.
    """
    environment, kills = child_environment(), count_memory_kills()
    with tempfile.TemporaryFile() as stdin, filter_file() as rules:
        inner = list(command) if sandbox is None else sandbox.around(command, environment, rules)
        stdin.write(request)
        stdin.seek(0)
        process = subprocess.Popen(
            [*LAUNCH, str(os.getpid()), *inner],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=() if sandbox is None or rules is None else (rules,),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        output = _ChildOutput(limits, on_progress)
        try:
            with process.stdout, process.stderr:
                _follow(process, output, limits, stopped)
        finally:
            end_all(process.pid)
            process.wait()
    if process.returncode == 0:
        return bytes(output.answer)
    raise error_of(process.returncode, bytes(output.stderr), kills)


async def run_confined_async(
    command: Sequence[str],
    request: bytes,
    limits: ChildLimits,
    *,
    sandbox: Sandbox | None = None,
) -> bytes:
    """Run `run_confined` in a thread; cancellation kills the child and waits for its end."""
    stopped = threading.Event()
    run = partial(run_confined, command, request, limits, sandbox=sandbox, stopped=stopped)
    work = asyncio.create_task(asyncio.to_thread(run))
    # Retrieved, or asyncio would log it, whatever else happens here: a task group cancels a task
    # again and again until it ends.
    work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        raise


class _ChildOutput:
    """Output of a child so far: its answer, its stderr and its progress."""

    def __init__(self, limits: ChildLimits, on_progress: OnProgress | None) -> None:
        self.answer = bytearray()
        self.stderr = bytearray()
        self.layer: str | None = None
        self._limits = limits
        self._line = bytearray()
        self._on_progress = on_progress
        self._reported_s = 0.0

    def add_answer(self, piece: bytes) -> None:
        self.answer += piece
        if len(self.answer) > self._limits.output_bytes:
            raise MeasurementError(
                f"the measuring process answered more than "
                f"{format_bytes(self._limits.output_bytes)}; measure a smaller model"
            )

    def add_stderr(self, piece: bytes) -> None:
        """Keep the end of standard error, and report the progress in its lines."""
        self.stderr += piece
        del self.stderr[:-MAX_STDERR_BYTES]
        *lines, rest = (self._line + piece).split(b"\n")
        self._line = bytearray(rest[-READ_BYTES:])
        for line in lines:
            progress = progress_of(bytes(line))
            if progress is not None:
                self.layer = progress["layer"] or None
                self._report(progress)

    def _report(self, progress: dict[str, Any]) -> None:
        now, is_last = time.monotonic(), progress["done"] == progress["total"]
        if self._on_progress and (is_last or now - self._reported_s > PROGRESS_S):
            self._reported_s = now
            self._on_progress(progress)


def _follow(
    process: subprocess.Popen[bytes],
    output: _ChildOutput,
    limits: ChildLimits,
    stopped: threading.Event | None,
) -> None:
    """Read a child's output until it ends; raise once it exceeds a limit or has to stop."""
    ends_s = time.monotonic() + limits.deadline_s
    with selectors.DefaultSelector() as pipes:
        for pipe, add in (
            (process.stdout, output.add_answer),
            (process.stderr, output.add_stderr),
        ):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            pipes.register(pipe, selectors.EVENT_READ, add)
        next_check_s = 0.0
        while True:
            has_ended = process.poll() is not None
            has_read = _read_pipes(pipes, 0 if has_ended else CHECK_S)
            # Not until end of file: descendants of the child may hold its pipes open.
            if has_ended and not has_read:
                return
            if (now := time.monotonic()) >= next_check_s:
                next_check_s = now + CHECK_S
                _check_limits(process.pid, output.layer, limits, ends_s, stopped)


def _read_pipes(pipes: selectors.BaseSelector, timeout_s: float) -> bool:
    """Read what is available and return whether there was anything."""
    if not pipes.get_map():
        time.sleep(timeout_s)
        return False
    has_read = False
    for key, _ in pipes.select(timeout_s):
        stream: IO[bytes] = key.fileobj  # type: ignore[assignment]  # what was registered
        piece = os.read(stream.fileno(), READ_BYTES)
        if not piece:
            pipes.unregister(stream)
        else:
            key.data(piece)
            has_read = True
    return has_read


def _check_limits(
    pid: int, layer: str | None, limits: ChildLimits, ends_s: float, stopped: threading.Event | None
) -> None:
    if stopped is not None and stopped.is_set():
        raise Cancelled("the measurement was stopped; start it again if it is still needed")
    if time.monotonic() > ends_s:
        raise DeadlineExceeded(
            f"no answer within {limits.deadline_s:g} s; lower profiling.budget_s, retry later, "
            "or measure elsewhere and post the profile"
        )
    used_bytes = memory_bytes(descendants(pid))
    if used_bytes > limits.memory_bytes:
        raise _out_of_memory(layer, used_bytes, limits)


def _out_of_memory(layer: str | None, used_bytes: int, limits: ChildLimits) -> OutOfMemory:
    where = f" at layer {layer!r}" if layer else ""
    return OutOfMemory(
        f"the measuring process used {format_bytes(used_bytes)}{where}, and this server's limit "
        f"is {format_bytes(limits.memory_bytes)}; measure a smaller model or micro-batch, or "
        "estimate it",
        layer=layer,
        required_bytes=used_bytes,
        available_bytes=limits.memory_bytes,
    )


PASSED_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND",
    "OMP_PLACES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "LD_LIBRARY_PATH", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
"""Variables that change how torch runs; all others stay with the server."""


def child_environment() -> dict[str, str]:
    """Return the environment variables of a child."""
    given = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return {
        **given,
        "USER": "nobody",  # else torch would look it up in /etc/passwd, which is not there
        "LOGNAME": "nobody",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
