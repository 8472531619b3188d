"""Log of what a rank's host launched and waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.nccl.launches import (
    MAIN,
    Act,
    Connect,
    Entry,
    FirstUse,
    InThread,
    Launch,
    Queue,
    StreamWait,
)


class LaunchLog:
    """What this rank's host did, in its order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self._loaded: set[str] = set()
        self.clear()

    def clear(self) -> None:
        """Begin anew; nothing may be under way."""
        self._connected: set[Queue] = set()
        self._thread = MAIN
        self.entries: list[Entry] = []
        self.launched = self.waits = 0

    def enter_thread(self, name: str) -> None:
        """Record this thread's reads from here on, under this name."""
        self._here.thread = name

    def is_entered(self) -> bool:
        """Return False in threads of gloo, which inherit torch's modes but play no host."""
        return hasattr(self._here, "thread")

    def connect(self, communicator: Queue, ranks: Sequence[int]) -> None:
        """Record the first use of a communicator, at which its members wait for each other."""
        with self._lock:
            if communicator not in self._connected:
                self._connected.add(communicator)
                self._append(Connect(communicator, tuple(ranks)))

    def launch(self, entry: Launch) -> int:
        """Record a launch; return its number."""
        with self._lock:
            self._append(entry)
            self.launched += 1
            return self.launched - 1

    def wait(self, launched: int) -> None:
        """Record that the compute stream waits for an operation."""
        with self._lock:
            self._append(StreamWait(launched))
            self.waits += 1

    def load(self, kernel: str) -> None:
        """Record the first use of a kernel."""
        with self._lock:
            if kernel not in self._loaded:
                self._loaded.add(kernel)
                self._append(FirstUse(f"loading {kernel}"))

    def add(self, entry: Act) -> None:
        """Record what the host waits for."""
        with self._lock:
            self._append(entry)

    def _append(self, entry: Act) -> None:
        thread = getattr(self._here, "thread", MAIN)
        if thread != self._thread:
            self._thread = thread
            self.entries.append(InThread(thread))
        self.entries.append(entry)


LOG = LaunchLog()
"""The log of this process."""
