"""The one place that starts a child on what somebody sent."""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from ...core.errors import Cancelled, DeadlineExceeded, MeasurementError, OutOfMemory
from ...core.units import format_bytes
from .bubblewrap import Sandbox
from .cgroups import Cgroup, CgroupParents
from .child_messages import error_of, progress_of
from .limits import ChildLimits
from .process_tree import descendants, end_all, memory_bytes

LOOKED_AT_S = 0.05
"""How often memory, the deadline and whether to stop are looked at."""

PROGRESS_S = 0.1
"""Progress that comes faster is skipped."""

READ_BYTES = 2**16
MAX_TALK_BYTES = 2**16

LAUNCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")))

OnProgress = Callable[[dict[str, Any]], None]


def run_confined(
    command: Sequence[str],
    request: bytes,
    limits: ChildLimits,
    *,
    sandbox: Sandbox | None = None,
    cgroups: CgroupParents | None = None,
    on_progress: OnProgress | None = None,
    stopped: threading.Event | None = None,
) -> bytes:
    """What a child writes when it is given a request.

    It sees a few variables of the environment and none that is a secret, and ends with the thread
    that calls this, however that ends. Whatever happens, nothing it started is left.

    Args:
        command: The program; it reads the request on standard input and answers on standard
            output, and on standard error it talks as `profiler.child` does.
        request: What it is given.
        limits: What it may take. Memory is looked at 20 times a second, so for so long there may
            be more.
        sandbox: Takes away the network and everything but reading what Python needs.
        cgroups: Limit its memory and processes by the kernel, which nothing escapes.
        on_progress: Called in this thread with ``done``, ``total``, ``layer``.
        stopped: Ends the child when set.

    Raises:
        InvalidInput, CaptureError, MeasurementError: The child says so, or ended without a word.
        OutOfMemory: It took more memory than it may; the error has what it measured by then if it
            said so, what it was seen to have, and what it may have.
        DeadlineExceeded: There was no answer in time.
        Cancelled: ``stopped`` was set.
    """
    environment = child_environment()
    inner = list(command) if sandbox is None else sandbox.around(command, environment)
    with _given(request) as given, _group(cgroups, limits) as group:
        process = subprocess.Popen(
            [*LAUNCH, str(os.getpid()), ":".join(group.folders), *inner],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        heard = _Heard(limits, on_progress)
        try:
            with process.stdout, process.stderr:
                _attend(process, heard, limits, stopped)
        finally:
            end_all(process.pid)
            process.wait()
        if process.returncode == 0:
            return bytes(heard.output)
        if group.ran_out():
            raise _too_much(heard.layer, limits.memory_bytes, limits)
        raise error_of(process.returncode, bytes(heard.talk))


async def run_confined_async(
    command: Sequence[str],
    request: bytes,
    limits: ChildLimits,
    *,
    sandbox: Sandbox | None = None,
    on_progress: OnProgress | None = None,
) -> bytes:
    """`run_confined` in a thread; cancelling ends the child before it is done."""
    stopped = threading.Event()
    work = asyncio.create_task(
        asyncio.to_thread(
            run_confined,
            command,
            request,
            limits,
            sandbox=sandbox,
            on_progress=on_progress,
            stopped=stopped,
        )
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([work])
        work.exception()  # it is Cancelled, and nobody else asks
        raise


class _Heard:
    """What a child said so far: its answer, its talk, how far it is."""

    def __init__(self, limits: ChildLimits, on_progress: OnProgress | None) -> None:
        self.output = bytearray()
        self.talk = bytearray()
        self.layer: str | None = None
        self._limits = limits
        self._line = bytearray()
        self._on_progress = on_progress
        self._told_s = 0.0

    def answer(self, piece: bytes) -> None:
        """More of standard output."""
        self.output += piece
        if len(self.output) > self._limits.output_bytes:
            raise MeasurementError(
                f"the answer of the measuring process is over "
                f"{format_bytes(self._limits.output_bytes)}; measure a smaller model"
            )

    def talked(self, piece: bytes) -> None:
        """More of standard error; its end is kept, and its lines may say how far it is."""
        self.talk += piece
        del self.talk[:-MAX_TALK_BYTES]
        *lines, rest = (self._line + piece).split(b"\n")
        self._line = bytearray(rest[-READ_BYTES:])
        for line in lines:
            told = progress_of(bytes(line))
            if told is not None:
                self.layer = told["layer"] or None
                self._tell(told)

    def _tell(self, told: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._on_progress and (now - self._told_s > PROGRESS_S or told["done"] == told["total"]):
            self._told_s = now
            self._on_progress(told)


def _attend(
    process: subprocess.Popen[bytes],
    heard: _Heard,
    limits: ChildLimits,
    stopped: threading.Event | None,
) -> None:
    """Listen to a child until it ends.

    Raises:
        StagewrightError: It has to be ended.
    """
    ends_s = time.monotonic() + limits.deadline_s
    with selectors.DefaultSelector() as pipes:
        for pipe, hear in ((process.stdout, heard.answer), (process.stderr, heard.talked)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            pipes.register(pipe, selectors.EVENT_READ, hear)
        looks_s = 0.0
        while True:
            has_ended = process.poll() is not None
            heard_more = _hear(pipes, 0 if has_ended else LOOKED_AT_S)
            if has_ended and not heard_more:  # what it started may hold its pipes open
                return
            if (now := time.monotonic()) >= looks_s:
                looks_s = now + LOOKED_AT_S
                _check(process.pid, heard.layer, limits, ends_s, stopped)


def _hear(pipes: selectors.BaseSelector, timeout_s: float) -> bool:
    """Take what there is to read; whether there was any."""
    if not pipes.get_map():
        time.sleep(timeout_s)
        return False
    heard = False
    for key, _ in pipes.select(timeout_s):
        stream: IO[bytes] = key.fileobj  # type: ignore[assignment]  # what was registered
        piece = os.read(stream.fileno(), READ_BYTES)
        if not piece:
            pipes.unregister(stream)
        else:
            key.data(piece)
            heard = True
    return heard


def _check(
    pid: int, layer: str | None, limits: ChildLimits, ends_s: float, stopped: threading.Event | None
) -> None:
    if stopped is not None and stopped.is_set():
        raise Cancelled("the measurement was stopped; ask again if it is still wanted")
    if time.monotonic() > ends_s:
        raise DeadlineExceeded(
            f"there was no answer after {limits.deadline_s:g} s; lower profiling.budget_s, "
            "ask again later, or measure elsewhere and post the profile"
        )
    used_bytes = memory_bytes(descendants(pid))
    if used_bytes > limits.memory_bytes:
        raise _too_much(layer, used_bytes, limits)


@contextmanager
def _given(request: bytes) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(request)
        file.seek(0)
        yield file


def _too_much(layer: str | None, used_bytes: int, limits: ChildLimits) -> OutOfMemory:
    where = f" at layer {layer!r}" if layer else ""
    return OutOfMemory(
        f"the measuring process had {format_bytes(used_bytes)}{where}, and this server gives it "
        f"{format_bytes(limits.memory_bytes)}; measure a smaller model or a smaller micro-batch, "
        "or estimate it",
        layer=layer,
        required_bytes=used_bytes,
        available_bytes=limits.memory_bytes,
    )


def _group(cgroups: CgroupParents | None, limits: ChildLimits) -> AbstractContextManager[Cgroup]:
    return nullcontext(Cgroup(())) if cgroups is None else cgroups.group(limits.memory_bytes)


HANDED_ON = (
    "PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND",
    "OMP_PLACES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "LD_LIBRARY_PATH", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
"""Variables that change how torch runs; every other stays with the server."""


def child_environment() -> dict[str, str]:
    """Variables of a child that measures or estimates."""
    given = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    return {
        **given,
        "USER": "nobody",  # torch asks who it is, and would look for a list of users
        "LOGNAME": "nobody",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
