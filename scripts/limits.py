"""Limits that a service under test keeps: when an answer is late, and how much memory it takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stagewright.api.sandbox.limits import descendants, memory_bytes

LATE_S = 2.0
"""An answer may come this long after its deadline."""

SERVER_BYTES = 600 * 2**20
"""Most resident memory of the server's own process, files included, at any time (``VmHWM``). The
processes that it starts have limits of their own."""

LOOKED_AT_S = 0.05


def deadline_of(body: object, default_s: float) -> float:
    """Return a request's own deadline if the server would accept it, else the server's default.

    Args:
        body: As JSON.
        default_s: The server's longest deadline.
    """
    own = body.get("deadline_s") if isinstance(body, dict) else None
    if isinstance(own, int | float) and not isinstance(own, bool) and 0 < own < default_s:
        return float(own)
    return default_s


def lateness(request: str, took_s: float, deadline_s: float) -> str:
    """Return a line that says how late an answer was; empty if it was not."""
    if took_s <= deadline_s + LATE_S:
        return ""
    return f"{request} took {took_s:.1f} s; its deadline is {deadline_s:g} s, and {LATE_S:g} s more"


@dataclass
class Watched:
    """Most memory that was seen of a server.

    Attributes:
        server_bytes: Of the server's own process, files included.
        children_bytes: Of all that it started, together, without mapped files.
    """

    server_bytes: int = 0
    children_bytes: int = 0

    def wrongs(self) -> list[str]:
        """Return a line if the server's own process had more than it may."""
        if self.server_bytes <= SERVER_BYTES:
            return []
        return [f"memory: the server had {_mib(self.server_bytes)}, limit {_mib(SERVER_BYTES)}"]

    def told(self) -> str:
        return (
            f"server at most {_mib(self.server_bytes)} (limit {_mib(SERVER_BYTES)}), "
            f"its children together {_mib(self.children_bytes)}"
        )

    def _look(self, pid: int) -> None:
        self.server_bytes = max(self.server_bytes, _peak(pid))
        self.children_bytes = max(self.children_bytes, memory_bytes(descendants(pid)[1:]))

    def _watch(self, pid: int, stop: threading.Event) -> None:
        while not stop.wait(LOOKED_AT_S):
            self._look(pid)


@contextmanager
def watched(pid: int) -> Iterator[Watched]:
    """Watch the memory of a server to the end of the block."""
    seen, stop = Watched(), threading.Event()
    seen._look(pid)
    watcher = threading.Thread(target=seen._watch, args=(pid, stop), daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def _peak(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
