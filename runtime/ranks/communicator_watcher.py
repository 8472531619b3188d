"""Watcher that ends a rank's wait for a lost rank on NCCL, which raises no error by itself.

With gloo the host waits for a message, and gets an error once its sender is gone. With NCCL a GPU's
stream waits: the host goes on until it reads a value, and then waits for ever, or until torch ends
the process. So whatever uses other ranks waits for the device before `PipelineRank.during` ends.
Aborting the communicators lets the streams go on, with garbage in the tensors, so
`FailureDetector.explain_errors` asks whether it happened before anybody uses them.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

from ...core.rank_heartbeats import INTERVAL_S, SILENCE_S, WAITING
from .failure_detection import ConnectionEnded, FailureDetector
from .process_groups import end_process

ADDRESS = "address"
FAREWELL = b"."
STUCK_S = 30.0
"""Time for a host to come back from an aborted operation; it may be at work of its own, too."""


class CommunicatorWatcher:
    """Thread that aborts this rank's communicators once a rank has failed.

    It learns that in one of three ways. Another rank found it out. Or the next rank's process ended
    without a farewell: then the operating system closes a connection that carries nothing else, and
    the heartbeat stops. Or this rank has waited for longer than the timeout.

    Args:
        detector: This rank's.
        timeout_s: Longest time at one activity in which ranks communicate.
        abort: Aborts the communicators; called at most once, in the thread.
    """

    def __init__(
        self, detector: FailureDetector, timeout_s: float, abort: Callable[[], None]
    ) -> None:
        self._detector, self._timeout_s, self._abort = detector, timeout_s, abort
        self._is_closed = threading.Event()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        detector.publish(ADDRESS, f"{_own_address()} {self._listener.getsockname()[1]}")
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Stop watching; tell the rank that watches this one that its process may end."""
        self._is_closed.set()
        try:
            self._listener.setblocking(False)
            watching, _ = self._listener.accept()
            watching.sendall(FAREWELL)
            watching.close()
        except OSError:
            pass  # the rank before this one has not connected, or is gone
        self._listener.close()

    def _watch(self) -> None:
        with self._connect() or nullcontext() as following:
            self._watch_connection(following)

    def _watch_connection(self, following: socket.socket | None) -> None:
        while not self._is_closed.wait(INTERVAL_S):
            if following is not None and select.select([following], [], [], 0)[0]:
                # One byte is its farewell, none the end of its process.
                has_left = _receive(following) == FAREWELL
                following = None
                if not has_left:
                    self._detector.find_silent_ranks()
            if self._has_lost_a_rank() and not self._is_closed.is_set():
                self._detector.was_aborted = True  # first: the main thread goes on at once
                self._abort()
                self._end_if_stuck()
                return

    def _end_if_stuck(self) -> None:
        """End the process if the abort does not end its wait, as where NCCL itself blocks."""
        deadline_s = time.monotonic() + STUCK_S
        while self._detector.is_blocked and time.monotonic() < deadline_s:
            if self._is_closed.wait(INTERVAL_S):
                return
        if self._detector.is_blocked:
            error = self._detector.diagnose(ConnectionEnded("aborting it changed nothing"))
            sys.stderr.write(f"RankFailed: {error}\n")
            end_process(1)

    def _has_lost_a_rank(self) -> bool:
        if self._is_late():
            self._detector.find_out()
            return True
        return self._detector.has_verdict or self._detector.has_lost_store

    def _connect(self) -> socket.socket | None:
        """Connect to the next rank, whose system accepts on its behalf; `None` if it does not."""
        following = (self._detector.rank + 1) % self._detector.num_ranks
        try:
            host, port = self._detector.wait_for(ADDRESS, following).split()
            return socket.create_connection((host, int(port)), timeout=SILENCE_S)
        except (OSError, RuntimeError):
            # It is gone, a firewall refuses the connection, or the store is gone. What other ranks
            # find out and the timeout remain.
            self._detector.find_silent_ranks()
            return None

    def _is_late(self) -> bool:
        # A rank at its own work leaves it to those that wait for it to say so.
        is_waiting = self._detector.current_activity.startswith(WAITING)
        grace_s = 0.0 if is_waiting else SILENCE_S
        patience_s = self._detector.patience * self._timeout_s + grace_s
        return self._detector.waited_s > patience_s


def _receive(connection: socket.socket) -> bytes:
    try:
        with connection:
            return connection.recv(len(FAREWELL))
    except OSError:  # reset, as by a process that ended before it accepted
        return b""


def _own_address() -> str:
    """Return the address at which other ranks reach this machine: the one it reaches rank 0 from.

    A datagram socket chooses it without sending anything.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
