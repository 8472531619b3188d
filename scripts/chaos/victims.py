"""Processes to kill: the server, its worker, and its database."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0


class Database(Protocol):
    """A database server that can be killed and started again."""

    def kill(self) -> None:
        """Kill it, and wait until it answers again."""


class Server:
    """The service, always at the same address.

    Args:
        database: Its address.
        folder: Where the log, and what the stand-in reads and writes, are.
    """

    def __init__(self, database: str, folder: Path) -> None:
        self._database, self._folder = database, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it and wait until it says where it is."""
        with (self._folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scripts.chaos.server",
                 self._database, str(self.port), str(self._folder)],
                stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert self.process.stdout is not None
        announced = json.loads(self.process.stdout.readline() or "{}")
        if "url" not in announced:
            self.process.wait(timeout=START_TIMEOUT_S)
            raise RuntimeError(f"the server did not start; see {self._folder / 'server.log'}")

    def kill(self) -> None:
        """Kill it and start another one."""
        self.end(signal.SIGKILL)
        self.start()

    def kill_worker(self) -> bool:
        """Kill its worker, which starts again by itself; whether there was one."""
        workers = [pid for pid in children(self.process.pid) if "spawn_main" in words_of(pid)]
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(workers)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal and collect it."""
        self.process.send_signal(number)
        self.process.wait(timeout=START_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class KilledPostgres:
    """A PostgreSQL server of `tests.api.postgres_server`, killed."""

    def __init__(self, server: object) -> None:
        self._server = server

    def kill(self) -> None:
        server = self._server
        process: subprocess.Popen[bytes] = server.process  # type: ignore[attr-defined]
        below = children(process.pid)
        process.kill()
        process.wait()
        end = time.monotonic() + START_TIMEOUT_S
        while any(is_alive(pid) for pid in below):  # they hold the memory it shares with them
            if time.monotonic() > end:
                raise RuntimeError("PostgreSQL's processes did not end")
            time.sleep(0.05)
        server.start()  # type: ignore[attr-defined]


def children(pid: int) -> list[int]:
    """Return processes right below one."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def words_of(pid: int) -> str:
    """Return a process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def is_alive(pid: int) -> bool:
    """Return True if a process runs; one that is not collected yet does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
