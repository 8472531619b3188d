"""examples/elastic.py under torchrun, and ranks or whole launchers of it killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from benchmarks.killed_ranks import loads_or_violates
from stagewright.runtime.checkpoint.load import latest_step

REPOSITORY = Path(__file__).resolve().parent.parent
MARK = "STAGEWRIGHT_KILLED"
STARTED = re.compile(r"rank (\d+) of (\d+), process (\d+): from step (\d+)")

Start = tuple[int, int, int, int]
"""Rank, number of ranks, process and first step."""


class Launched:
    """A launcher, what it and its ranks print, and every process that descends from it.

    Args:
        torchrun: The launcher's options.
        script: Arguments of the example.
        environment: Added to this process's.
    """

    def __init__(
        self, torchrun: Sequence[str], script: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.mark = f"{MARK}={uuid.uuid4()}"
        name, value = self.mark.split("=")
        command = [
            sys.executable, "-m", "torch.distributed.run", *torchrun,
            str(REPOSITORY / "examples" / "elastic.py"), *script,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def starts(self) -> list[Start]:
        """Return what the ranks said when they began, in this attempt and those before."""
        found = (STARTED.search(line) for line in list(self.lines))
        return [
            (int(rank), int(count), int(process), int(step))
            for rank, count, process, step in (match.groups() for match in found if match)
        ]

    def processes(self) -> list[int]:
        """All that still run, found by a mark in their environment, which children inherit."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """Kill the launcher and its ranks, as if the machine had lost power."""
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()

    def stop(self, timeout_s: float) -> list[int]:
        """Ask the launcher to end; what is still there afterwards."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.processes()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def kill_ranks(
    times: int, num_ranks: int, folder: Path, profile: Path, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Kill one rank after the other of a job on one machine, which restarts each time."""
    torchrun = [
        "--nnodes=1", f"--nproc-per-node={num_ranks}", f"--max-restarts={times}",
        "--monitor-interval=0.1",
    ]  # fmt: skip
    with Launched(torchrun, _script(profile, folder, num_ranks), {}) as job:
        began = _training([job], 0, num_ranks, timeout_s)
        for number in range(times):
            victim = number % num_ranks
            delay_s = _a_while([job], folder, began, timeout_s)
            saved, seen = latest_step(folder) or 0, len(job.starts())
            os.kill(next(process for rank, _, process, _ in began if rank == victim), 9)
            start = time.monotonic()
            began = _training([job], seen, num_ranks, timeout_s)
            row = _row("torchrun restarts the group", victim, delay_s, saved, began)
            row["ended_s"] = round(time.monotonic() - start, 2)
            if number + 1 == times:
                _end([job], folder, row, timeout_s)
            yield row


def lose_launchers(
    num_launchers: int, folder: Path, profile: Path, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Kill one launcher after the other with its rank, until one is left.

    The store where launchers meet is this process's, so that any of them may be lost.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = [
        f"--nnodes=1:{num_launchers}", "--nproc-per-node=1", f"--max-restarts={num_launchers}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=killed",
        "--rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=1,join_timeout=120",
        "--local-addr=127.0.0.1", "--monitor-interval=0.1",
    ]  # fmt: skip
    script = _script(profile, folder, num_launchers)
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(Launched(torchrun, script, environment))
            for _ in range(num_launchers)
        ]
        began = _training(jobs, 0, num_launchers, timeout_s)
        while len(jobs) > 1:
            delay_s = _a_while(jobs, folder, began, timeout_s)
            saved = latest_step(folder) or 0
            lost = jobs.pop(random.randrange(len(jobs)))
            victim = lost.starts()[-1][0]
            seen = sum(len(job.starts()) for job in jobs)
            start = time.monotonic()
            lost.kill()
            began = _training(jobs, seen, len(jobs), timeout_s)
            row = _row(f"{len(jobs)} launchers left", victim, delay_s, saved, began)
            row["ended_s"] = round(time.monotonic() - start, 2)
            if len(jobs) == 1:
                _end(jobs, folder, row, timeout_s)
            yield row


def wait_until(condition: Callable[[], bool], jobs: Sequence[Launched], timeout_s: float) -> None:
    """Wait for what the jobs print.

    Raises:
        TimeoutError: It did not come, or a launcher ended first; with what was printed.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        over = any(job.process.poll() is not None for job in jobs)
        if over or time.monotonic() > deadline:
            printed = "\n".join(line for job in jobs for line in job.lines[-40:])
            raise TimeoutError(f"{'a launcher ended' if over else 'too late'}:\n{printed}")
        time.sleep(0.02)


def _training(jobs: list[Launched], seen: int, count: int, timeout_s: float) -> list[Start]:
    """Return the ranks that began since ``seen`` of them had, once they train."""

    def began() -> list[Start]:
        found = [start for job in jobs for start in job.starts()]
        latest = [job.starts()[-count if len(jobs) == 1 else -1 :] for job in jobs]
        return [s for some in latest for s in some] if len(found) >= seen + count else []

    wait_until(lambda: bool(began()) and any(_trains(job) for job in jobs), jobs, timeout_s)
    return began()


def _a_while(jobs: list[Launched], folder: Path, began: list[Start], timeout_s: float) -> float:
    """Let them save at least once, so that there is something to lose, and then some seconds."""
    first = began[0][3]
    wait_until(lambda: (latest_step(folder) or 0) > first, jobs, timeout_s)
    delay_s = random.uniform(0, 2)
    time.sleep(delay_s)
    return delay_s


def _end(jobs: list[Launched], folder: Path, row: dict[str, Any], timeout_s: float) -> None:
    """Stop the job, and see what it leaves."""
    if any([job.stop(timeout_s) for job in jobs]):
        row["violations"].append("a process is left")
    row["checkpoint"] = loads_or_violates(folder, row["violations"])


def _trains(job: Launched) -> bool:
    """Return True if a step was printed since one of its ranks last began."""
    lines = list(job.lines)
    last = max((i for i, line in enumerate(lines) if STARTED.search(line)), default=len(lines))
    return any(line.startswith("step ") for line in lines[last:])


def _script(profile: Path, folder: Path, num_ranks: int) -> list[str]:
    return [
        str(profile), "--checkpoints", str(folder), "--stages", str(num_ranks),
        "--steps", "10000000", "--save-every", "10",
    ]  # fmt: skip


def _row(way: str, victim: int, delay_s: float, saved: int, began: list[Start]) -> dict[str, Any]:
    violations = []
    steps = sorted({step for _, _, _, step in began})
    if len(steps) > 1 or steps[0] < saved:
        violations.append(f"resumed from steps {steps}, though step {saved} was saved")
    count = len(began)
    if {ranks for _, ranks, _, _ in began} != {count}:
        violations.append(f"{count} ranks are there, but the plan is for another number")
    return {
        "way": way, "victim": victim, "after_s": round(delay_s, 3), "checkpoint": saved,
        "said": f"{count} ranks went on from step {steps[0]}", "violations": violations,
    }  # fmt: skip
