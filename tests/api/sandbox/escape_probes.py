"""Probes that try to escape from a sandbox, run inside it with the standard library alone.

``escape_probes.py NAME`` reads JSON on standard input and prints a JSON list of its successes.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

CHUNK = 2**20
CLONE_NEWUSER = 0x10000000
WRITABLE = ("/tmp", "/dev/shm")
"""Private memory file systems, which vanish with the sandbox."""


def network(given: dict[str, Any]) -> Iterable[str]:
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", given["port"])),
        (socket.AF_INET, ("192.0.2.1", 80)),
        (socket.AF_UNIX, "\0" + given["abstract"]),
    ):
        with suppress(OSError), socket.socket(family) as tried:
            tried.settimeout(1)
            tried.connect(address)
            yield f"connected to {address}"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        tried.sendto(b"x", ("192.0.2.1", 53))
        yield "sent a datagram"
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:
        yield f"sees the network interfaces {others}"


def writing(given: dict[str, Any]) -> Iterable[str]:
    folders = {"/", "/usr", "/etc", "/var/tmp", "/root", "/home", sys.prefix, *given["folders"]}
    for base in list(sys.path):
        folders.add(base or ".")
    for folder in sorted(folders):
        if _is_scratch(os.path.realpath(folder), given["readable"]):
            continue
        with suppress(OSError):
            name = os.path.join(folder, given["marker"])
            with open(name, "w"):
                pass
            os.unlink(name)
            yield f"wrote in {folder}"
    with suppress(OSError):
        with open(given["secret"], "a") as file:
            file.write("changed")
        yield "changed a file outside"


def secrets(given: dict[str, Any]) -> Iterable[str]:
    for path in (
        given["secret"],
        "/etc/passwd",
        "/etc/shadow",
        "/root/.ssh",
        "/run",
        *given["homes"],
    ):
        if os.path.isdir(path):
            listed = [
                name for name in os.listdir(path) if not _leads_to(path, name, given["readable"])
            ]
            if listed:
                yield f"sees {listed[0]!r} in {path}"
        elif os.access(path, os.R_OK):
            yield f"read {path}"
    for file in glob.glob("/proc/[0-9]*/environ"):
        with suppress(OSError), open(file, "rb") as environment:
            if given["token"].encode() in environment.read():
                yield f"found a secret variable in {file}"
    yield from (f"has the variable {name}" for name in os.environ if name not in given["variables"])


def processes(given: dict[str, Any]) -> Iterable[str]:
    for kind, outside in given["namespaces"].items():
        if os.readlink(f"/proc/self/ns/{kind}") == outside:
            yield f"shares the {kind} namespace"
    for file in glob.glob("/proc/[0-9]*/cmdline"):
        with suppress(OSError), open(file, "rb") as command:
            if given["marker"].encode() in command.read():
                yield f"sees a process outside: {file}"


def privileges(_: dict[str, Any]) -> Iterable[str]:
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    for name in ("CapEff", "CapPrm", "CapBnd"):
        if int(status[name], 16):
            yield f"has capabilities ({name} {status[name].strip()})"
    if status["NoNewPrivs"].strip() != "1":
        yield "may gain privileges by running other programs"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) == 0:
        yield "made a user namespace"
    if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
        yield "mounted a file system"


def calls(given: dict[str, Any]) -> Iterable[str]:
    """Make system calls that only the filter refuses: they need no privilege."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, number in given["calls"].items():
        ctypes.set_errno(0)
        # Arguments that are wrong, or do nothing: a call that is let in fails otherwise, or works.
        if libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) >= 0 or (
            ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
        ):
            yield f"called {name}"
    for family in given["families"]:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM):
            yield f"opened a socket of family {family}"
    if libc.ioctl(0, 0x5412, b"x") == 0 or ctypes.get_errno() != errno.EPERM:
        yield "typed into a terminal"


def kernel(_: dict[str, Any]) -> Iterable[str]:
    for root in ("/proc/sys", "/proc/irq", "/proc/bus"):
        for folder, _, names in os.walk(root):
            for name in names:
                with suppress(OSError):
                    os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
                    yield f"may write {folder}/{name}"


def outliving(given: dict[str, Any]) -> Iterable[str]:
    """Leave a process in a new session, under a name to be looked for."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            code = "import time; time.sleep(120)"
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, given["marker"]])
        os._exit(0)
    time.sleep(0.2)
    sys.stderr.write('{"done": 1, "total": 1, "layer": "left"}\n')
    sys.stderr.flush()
    time.sleep(120)
    return []


def memory(given: dict[str, Any]) -> Iterable[str]:
    """Take more memory than allowed; reaching the end is an escape."""
    kept = {"itself": _itself, "children": _children}[given["way"]](given["bytes"])
    if kept > given["allowed"]:
        yield f"kept {kept} bytes ({given['way']}) with {given['allowed']} allowed"


def _itself(many: int) -> int:
    held = mmap.mmap(-1, many)
    for at in range(0, many, CHUNK):
        held[at : at + CHUNK] = b"x" * CHUNK
    time.sleep(0.5)
    return many


def _children(many: int) -> int:
    """Share the memory among processes, none of which takes too much alone."""
    parts, ready = 8, os.pipe()
    children = []
    for _ in range(parts):
        child = os.fork()
        if child == 0:
            os.setsid()
            _itself(many // parts)
            os.write(ready[1], b"x")
            time.sleep(60)
        children.append(child)
    os.close(ready[1])
    kept = 0
    while kept < parts and os.read(ready[0], 1):
        kept += 1
    time.sleep(0.5)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return kept * (many // parts)


def _is_scratch(folder: str, readable: Iterable[str]) -> bool:
    """Return True if a folder is private memory and no mounted readable path."""
    outside = any(folder == place or folder.startswith(place + os.sep) for place in readable)
    return folder.startswith(WRITABLE) and not outside


def _leads_to(folder: str, name: str, readable: Iterable[str]) -> bool:
    """Return True if an entry is visible only because a readable path lies at or below it."""
    path = os.path.join(folder, name)
    return any(place == path or place.startswith(path + os.sep) for place in readable)


PROBES: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    probe.__name__: probe
    for probe in (
        network, writing, secrets, processes, privileges, calls, kernel, outliving, memory,
    )
}  # fmt: skip


def main() -> None:
    found = list(PROBES[sys.argv[1]](json.load(sys.stdin)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
