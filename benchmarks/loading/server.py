"""The service as users start it, with a key for each process of clients, and what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stagewright.api.store.records import DEFAULT_PROJECT
from stagewright.api.store.store import Store

ROOT = Path(__file__).resolve().parents[2]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        tokens: A key for each process of clients, each of a project of its own.
        pid: Of the process that answers; those that plan are its children.
        log: What it says to people.
    """

    host: str
    port: int
    tokens: list[str]
    pid: int
    log: Path


@contextmanager
def served(database: str, folder: Path, num_keys: int) -> Iterator[Server]:
    """Yield a server on a new database."""
    tokens = _keys(database, num_keys)
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "stagewright.api", "--port", "0"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder,
            env={**os.environ, "STAGEWRIGHT_DATABASE": database, "OMP_NUM_THREADS": "1",
                 # Two keys stand for 200 clients here.
                 "STAGEWRIGHT_KEY_REQUESTS_PER_MINUTE": "unlimited",
                 "STAGEWRIGHT_PROJECT_REQUESTS_PER_MINUTE": "unlimited"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            announced = json.loads(process.stdout.readline() or "{}")
            if "url" not in announced:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            address = urlsplit(announced["url"])
            assert address.hostname is not None
            assert address.port is not None
            yield Server(address.hostname, address.port, tokens, process.pid, log)
            if process.poll() is not None:
                raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")
        finally:
            process.terminate()
            process.wait(timeout=60)


def _keys(database: str, number: int) -> list[str]:
    store = Store(database)
    try:
        projects = [DEFAULT_PROJECT]
        projects += [store.projects.create(f"load {part}").id for part in range(1, number)]
        return [
            store.keys.create(project, name="load", scopes=("read", "plan")).secret
            for project in projects
        ]
    finally:
        store.close()


def cpu_s(pid: int, *, children: bool) -> float:
    """Processor time that a process, or all below it, used so far, those included that ended."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    ended: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        number = int(folder.name)
        parents[number] = int(fields[1])
        used[number] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        ended[number] = (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    if not children:
        return used.get(pid, 0.0)
    below = {number for number in parents if number != pid and _is_below(number, pid, parents)}
    return ended.get(pid, 0.0) + sum(used[number] + ended[number] for number in below)


def _is_below(number: int, pid: int, parents: dict[int, int]) -> bool:
    while number in parents:
        if number == pid:
            return True
        number = parents[number]
    return False
