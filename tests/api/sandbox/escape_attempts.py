"""Attempts to escape from the sandbox on this machine, each by a probe inside of it."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from stagewright.api.sandbox.bubblewrap import Sandbox
from stagewright.api.sandbox.child import PASSED_VARIABLES, run_confined
from stagewright.api.sandbox.limits import ChildLimits
from stagewright.api.sandbox.seccomp import CALLS, MACHINES
from stagewright.core.errors import Cancelled, MeasurementError, OutOfMemory, StagewrightError

PROBES = Path(__file__).with_name("escape_probes.py")
MEBIBYTE = 2**20
ALLOWED_BYTES = 96 * MEBIBYTE
"""Enough for the Python interpreter alone."""

PROBED_WITHIN_S = 30.0
GONE_WITHIN_S = 3.0
PROBED = ("network", "writing", "secrets", "processes", "privileges", "calls", "kernel")
HARMLESS = ("keyctl", "kcmp", "process_vm_readv", "ptrace", "io_uring_setup", "userfaultfd",
            "perf_event_open", "bpf", "add_key", "name_to_handle_at")  # fmt: skip
"""Calls that may be tried with zeros for arguments."""

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
VARIABLES = (*PASSED_VARIABLES, "HOME", "TMPDIR", "USER", "LOGNAME", "PWD", "HF_HUB_OFFLINE",
             "PYTHONDONTWRITEBYTECODE", "LC_CTYPE")  # fmt: skip


def try_to_escape(sandbox: Sandbox | None) -> dict[str, str]:
    """Return the probes that escaped, with what they reached."""
    escapes: dict[str, str] = {}
    with bait() as given:
        given["readable"] = sandbox.readable if sandbox else ()
        for probe in PROBED:
            note(escapes, probe, partial(answer, sandbox, probe, given))
        for way in ("itself", "children"):
            wanted = {"way": way, "bytes": 3 * ALLOWED_BYTES, "allowed": ALLOWED_BYTES}
            note(escapes, f"memory ({way})", partial(overstepping, sandbox, wanted))
        note(escapes, "outliving", partial(left_behind, sandbox, given["marker"]))
    return escapes


def note(escapes: dict[str, str], probe: str, run: Callable[[], list[str]]) -> None:
    """Run a probe and note an escape; a probe that could not run counts as one."""
    try:
        found = run()
    except StagewrightError as error:
        found = [f"the probe could not be made: {error}"]
    if found:
        escapes[probe] = ", ".join(found)[:300]


def answer(
    sandbox: Sandbox | None,
    probe: str,
    given: dict[str, Any],
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    stopped: threading.Event | None = None,
) -> list[str]:
    printed = run_confined(
        [sys.executable, "-I", "-S", "-c", PROBES.read_text(encoding="utf-8"), probe],
        json.dumps(given).encode(),
        ChildLimits(ALLOWED_BYTES, PROBED_WITHIN_S, MEBIBYTE),
        sandbox=sandbox,
        on_progress=on_progress,
        stopped=stopped,
    )
    return [str(found) for found in json.loads(printed)]


def overstepping(sandbox: Sandbox | None, wanted: dict[str, Any]) -> list[str]:
    """Return the escape of a probe that takes too much memory, unless it is stopped."""
    try:
        return answer(sandbox, "memory", wanted)
    except OutOfMemory:
        return []
    except MeasurementError as error:  # the kernel may kill any of its processes
        return [] if "SIGKILL" in str(error) else [str(error)]


def left_behind(sandbox: Sandbox | None, marker: str) -> list[str]:
    stopped, marker = threading.Event(), marker + "-left"
    has_started = threading.Event()

    def stop(_: dict[str, Any]) -> None:
        has_started.set()
        stopped.set()

    with suppress(Cancelled):
        answer(sandbox, "outliving", {"marker": marker}, on_progress=stop, stopped=stopped)
    if not has_started.is_set():
        return ["it left no process to look for"]
    ends_s = time.monotonic() + GONE_WITHIN_S
    while left := running(marker):
        if time.monotonic() > ends_s:
            for pid in left:
                os.kill(pid, 9)
            return ["left a process running"]
        time.sleep(0.02)
    return []


def running(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@contextmanager
def bait() -> Iterator[dict[str, Any]]:
    """Yield targets for the probes: a listener, files, a secret, this process's namespaces."""
    column = MACHINES.get(platform.machine(), (0, 0))[0]
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
            "calls": {name: CALLS[name][column] for name in HARMLESS},
            "families": (38, 40),  # AF_ALG, AF_VSOCK
            "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES},
        }
