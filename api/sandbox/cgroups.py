"""Control groups: limits on memory and processes enforced by the kernel.

Polling the memory of processes misses memory that none of them maps, such as files in memory, and
lags behind. A control group counts all of it, but creating one takes privileges.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import Refused, StagewrightError

MAX_PROCESSES = 512
"""Threads count as processes."""

REMOVED_WITHIN_S = 5.0
NAME = "stagewright-child-"

_numbers = itertools.count()


@dataclass(frozen=True)
class Cgroup:
    """Control group of one child.

    Attributes:
        folders: One in cgroup v2; one for memory and one for processes in v1.
    """

    folders: tuple[str, ...]

    def ran_out(self) -> bool:
        """Return True if the kernel killed a process of the group for lack of memory."""
        events = ""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    events += Path(folder, name).read_text()
        return any(int(count) for count in re.findall(r"^oom_kill (\d+)$", events, re.MULTILINE))


@dataclass(frozen=True)
class CgroupParents:
    """Parents of the children's groups.

    Attributes:
        memory: Folder of the group that limits memory.
        pids: Folder of the group that limits processes; in cgroup v2 equal to ``memory``.
    """

    memory: str
    pids: str

    @contextmanager
    def group(self, memory_bytes: int) -> Iterator[Cgroup]:
        """Yield a new group, and at the end kill its processes and remove it.

        Raises:
            StagewrightError: It cannot be created.
        """
        for parent in {self.memory, self.pids}:
            _tidy(Path(parent))
        name = f"{NAME}{os.getpid()}-{next(_numbers)}"
        folders = tuple(dict.fromkeys(str(Path(p, name)) for p in (self.memory, self.pids)))
        try:
            try:
                for folder in folders:
                    Path(folder).mkdir()
                _limit(folders[0], folders[-1], memory_bytes)
            except OSError as error:
                raise StagewrightError(f"cannot create a control group: {error}") from error
            yield Cgroup(folders)
        finally:
            for folder in folders:
                _remove(Path(folder))


def find_cgroups() -> CgroupParents:
    """Return where this process may create groups.

    Raises:
        Refused: Nowhere; the message says what would help.
    """
    mine = dict(_own())
    if "memory" in mine and "pids" in mine:
        return CgroupParents(mine["memory"], mine["pids"])
    # cgroup v2 delegates controllers only to children of a group without processes of its own,
    # hence the attempt one level up (systemd's DelegateSubgroup).
    for candidate in filter(None, (mine.get(""), os.path.dirname(mine.get("", "")))):
        control = Path(candidate, "cgroup.subtree_control")
        with suppress(OSError):
            control.write_text("+memory +pids")
        with suppress(OSError):
            if {"memory", "pids"} <= {*control.read_text().split()} and os.access(
                candidate, os.W_OK
            ):
                return CgroupParents(candidate, candidate)
    raise Refused(
        "this process may not create control groups that limit memory and processes; under "
        "systemd set Delegate=yes and DelegateSubgroup=server, in a container mount cgroups "
        "writable"
    )


def _own() -> Iterator[tuple[str, str]]:
    """Yield controllers and folders of this process's groups; cgroup v2 has an empty name."""
    mounts: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup2":
                mounts[""] = before.split()[4]
            elif kind == "cgroup":
                mounts |= dict.fromkeys(options.split(","), before.split()[4])
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(","):
                folder = mounts.get(name, "") + path.rstrip("/")
                if name in mounts and os.access(folder, os.W_OK):
                    yield name, folder


def _limit(memory: str, pids: str, memory_bytes: int) -> None:
    is_v2 = Path(memory, "memory.max").exists()
    Path(memory, "memory.max" if is_v2 else "memory.limit_in_bytes").write_text(str(memory_bytes))
    with suppress(OSError):  # where the kernel counts swap at all
        if is_v2:
            Path(memory, "memory.swap.max").write_text("0")
        else:
            Path(memory, "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
    Path(pids, "pids.max").write_text(str(MAX_PROCESSES))


def _tidy(parent: Path) -> None:
    """Remove groups left behind by killed servers; a group in use cannot be removed."""
    for left in parent.glob(f"{NAME}*"):
        maker = left.name.removeprefix(NAME).partition("-")[0]
        if not Path("/proc", maker).exists():
            with suppress(OSError):
                left.rmdir()


def _remove(folder: Path) -> None:
    """Kill a group's processes and remove it."""
    ends_s = time.monotonic() + REMOVED_WITHIN_S
    # A group can be removed only once the kernel has reaped its last process.
    while folder.exists():
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), 9)
        with suppress(OSError):
            folder.rmdir()
            return
        if time.monotonic() > ends_s:
            return
        time.sleep(0.01)
