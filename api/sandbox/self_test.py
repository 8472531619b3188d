"""Self-test of the sandbox on this machine: probes that try to escape from it.

Clients' code runs only where every probe fails. Vulnerabilities of the kernel cannot be tested;
keep it up to date.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ...core.errors import Cancelled, MeasurementError, OutOfMemory, Refused, StagewrightError
from .bubblewrap import Sandbox, find_sandbox
from .cgroups import MAX_PROCESSES, CgroupParents, find_cgroups
from .child import PASSED_VARIABLES, run_confined
from .limits import ChildLimits

PROBES = Path(__file__).with_name("escape_probes.py")
MEBIBYTE = 2**20
ALLOWED_BYTES = 96 * MEBIBYTE
"""Enough for the Python interpreter alone."""

FORKING_BYTES = 4 * 2**30
"""Large, because shared pages count for every process."""

PROBED_WITHIN_S = 30.0
GONE_WITHIN_S = 3.0
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
VARIABLES = (*PASSED_VARIABLES, "HOME", "TMPDIR", "USER", "LOGNAME", "PWD", "HF_HUB_OFFLINE",
             "PYTHONDONTWRITEBYTECODE", "LC_CTYPE")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Confinement of a child; clients' code requires both parts.

    Attributes:
        sandbox: Limits what it can reach.
        cgroups: Limit what it can consume.
    """

    sandbox: Sandbox | None
    cgroups: CgroupParents | None


@cache
def proven_cell() -> Cell:
    """Return a cell that held against every probe, tested once per process.

    Raises:
        Refused: There is none; the message says what is missing or which probes escaped.
    """
    cell = Cell(find_sandbox(), find_cgroups())
    escapes = try_to_escape(cell)
    if escapes:
        found = "; ".join(f"{probe}: {loot}" for probe, loot in escapes.items())
        raise Refused(f"the sandbox does not hold on this machine ({found})")
    return cell


def try_to_escape(cell: Cell) -> dict[str, str]:
    """Return the probes that escaped, with what they reached."""
    escapes: dict[str, str] = {}
    with _bait() as given:
        given["readable"] = cell.sandbox.readable if cell.sandbox else ()
        for probe in ("network", "writing", "secrets", "processes", "privileges"):
            _note(escapes, probe, partial(_answer, cell, probe, given))
        for way in ("itself", "children", "files"):
            wanted = {"way": way, "bytes": 3 * ALLOWED_BYTES, "allowed": ALLOWED_BYTES}
            _note(escapes, f"memory ({way})", partial(_overstepping, cell, wanted))
        _note(escapes, "forking", partial(_forking, cell))
        _note(escapes, "outliving", partial(_left_behind, cell, given["marker"]))
    return escapes


def _note(escapes: dict[str, str], probe: str, run: Callable[[], list[str]]) -> None:
    """Run a probe and note an escape; a probe that could not run counts as one."""
    try:
        found = run()
    except StagewrightError as error:
        found = [f"the probe could not be made: {error}"]
    if found:
        escapes[probe] = ", ".join(found)[:300]


def _answer(
    cell: Cell,
    probe: str,
    given: dict[str, Any],
    *,
    memory_bytes: int = ALLOWED_BYTES,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    stopped: threading.Event | None = None,
) -> list[str]:
    answer = run_confined(
        [sys.executable, "-I", "-S", "-c", PROBES.read_text(encoding="utf-8"), probe],
        json.dumps(given).encode(),
        ChildLimits(memory_bytes, PROBED_WITHIN_S, MEBIBYTE),
        sandbox=cell.sandbox,
        cgroups=cell.cgroups,
        on_progress=on_progress,
        stopped=stopped,
    )
    return [str(found) for found in json.loads(answer)]


def _overstepping(cell: Cell, wanted: dict[str, Any]) -> list[str]:
    """Return the escape of a probe that takes too much memory, unless it is stopped."""
    try:
        return _answer(cell, "memory", wanted)
    except OutOfMemory:
        return []
    except MeasurementError as error:  # the kernel may kill any of its processes
        return [] if "SIGKILL" in str(error) else [str(error)]


def _forking(cell: Cell) -> list[str]:
    given = {"many": 2 * MAX_PROCESSES}
    return _answer(cell, "forking", given, memory_bytes=FORKING_BYTES)


def _left_behind(cell: Cell, marker: str) -> list[str]:
    stopped, marker = threading.Event(), marker + "-left"
    has_started = threading.Event()

    def stop(_: dict[str, Any]) -> None:
        has_started.set()
        stopped.set()

    with suppress(Cancelled):
        _answer(cell, "outliving", {"marker": marker}, on_progress=stop, stopped=stopped)
    if not has_started.is_set():
        return ["it left no process to look for"]
    ends_s = time.monotonic() + GONE_WITHIN_S
    while left := _running(marker):
        if time.monotonic() > ends_s:
            for pid in left:
                os.kill(pid, 9)
            return ["left a process running"]
        time.sleep(0.02)
    return []


def _running(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@contextmanager
def _bait() -> Iterator[dict[str, Any]]:
    """Yield targets for the probes: a listener, files, a secret, this process's namespaces."""
    marker = f"stagewright-probe-{secrets.token_hex(8)}"
    with (
        tempfile.TemporaryDirectory(prefix="stagewright-probe-") as hidden,
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind("\0" + marker)
        abstract.listen()
        os.chmod(hidden, 0o777)
        secret = Path(hidden, "secret")
        secret.write_text(marker)
        secret.chmod(0o666)
        yield {
            "marker": marker,
            "token": os.environ.get("STAGEWRIGHT_TOKEN") or marker,
            "secret": str(secret),
            "folders": [hidden, os.getcwd()],
            "homes": [str(Path.home()), os.getcwd()],
            "port": listening.getsockname()[1],
            "abstract": marker,
            "variables": VARIABLES,
            "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES},
        }
