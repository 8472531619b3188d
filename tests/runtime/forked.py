"""Ranks forked from one worker, so that torch is imported once and not by each of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from unittest import mock

from stagewright.profiler.links.launch_local import free_port

MANNERS = "NCCL_MANNERS"
"""Of the environment: the folder to which ranks write what they launch."""

REPOSITORY = Path(__file__).resolve().parents[2]


def start_python(executable: Path | str, *arguments: str) -> subprocess.Popen[str]:
    """Python, or `forking_executable` in its place, in the repository and a session of its own."""
    return subprocess.Popen(
        [str(executable), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_python(
    executable: Path | str, *arguments: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """What became of it; it and whatever it forked are gone afterwards."""
    process = start_python(executable, *arguments)
    try:
        output, words = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()  # left open after a timeout, it would be a later test's warning
    sys.stderr.write(words)  # shown where a test fails
    return subprocess.CompletedProcess(arguments, process.returncode, output, words)


def run_worker(executable: Path | str, module: str, *arguments: str, timeout_s: float) -> str:
    """What a worker printed.

    Raises:
        AssertionError: It failed; with the end of what it and its ranks wrote to stderr.
    """
    done = run_python(executable, "-m", module, *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_as_on_nccl(
    executable: Path | str,
    module: str,
    *arguments: str,
    timeout_s: float,
    is_bound: bool = False,
) -> str:
    """What a worker printed, whose ranks launch nothing that could wait for ever on NCCL."""
    from tests.nccl.process_group import BOUND, find_deadlocks  # imports torch

    with tempfile.TemporaryDirectory() as folder:
        environment = {MANNERS: folder} | ({BOUND: "1"} if is_bound else {})
        with mock.patch.dict(os.environ, environment):
            printed = run_worker(executable, module, *arguments, timeout_s=timeout_s)
        blocked = find_deadlocks(Path(folder))
    # In words of its own: pytest explains no assertions of modules that are no tests.
    assert not blocked, "\n".join(blocked)
    return printed


def fork_ranks(count: int, run: Callable[[], None], words: str | None = None) -> list[int]:
    """Process ids of ranks that find each other by the environment and each call ``run``.

    What rank r writes to stderr goes to the file ``words`` with r in place of ``{}``.
    """
    port = free_port()
    return [
        _fork(
            {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
            },
            run,
            None if words is None else words.format(rank),
        )
        for rank in range(count)
    ]  # fmt: skip


def _fork(environment: dict[str, str], run: Callable[[], None], words: str | None) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        if words is not None:
            os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
        os.environ.update(environment)
        with _manners():
            run()
        code = 0
    except BaseException:  # noqa: BLE001 (a fork never returns to the parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _manners() -> contextlib.AbstractContextManager[None]:
    """Run as on NCCL if the environment names a folder for what ranks launch."""
    if not (folder := os.environ.get(MANNERS)):
        return contextlib.nullcontext()
    from tests.nccl.process_group import emulated  # imports torch

    return emulated(Path(folder))


def exit_codes(ranks: list[int], hung: Collection[int] = ()) -> dict[int, int]:
    """Of all ranks but those that hang, which are killed when the others have ended."""
    statuses = {
        rank: os.waitpid(process, 0)[1]
        for rank, process in enumerate(ranks)
        if rank not in hung
    }  # fmt: skip
    for rank in hung:
        os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)
    return {rank: os.waitstatus_to_exitcode(status) for rank, status in statuses.items()}


def run_forked(count: int, run: Callable[[], None]) -> None:
    """Fork the ranks and wait for them; ends this process where one fails."""
    codes = exit_codes(fork_ranks(count, run))
    if any(codes.values()):
        sys.exit(f"exit codes of ranks: {codes}")


def print_line(found: dict[str, object]) -> None:
    """As JSON, in one write, so that lines of several ranks do not mix."""
    os.write(sys.stdout.fileno(), (json.dumps(found) + "\n").encode())
