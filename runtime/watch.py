"""Who is still there: heartbeats between ranks, and a verdict when one is not.

A rank that dies closes its connections, and its neighbours' next wait fails with the transport's
own words. Ranks further away fail later, because their neighbour ended. So before a rank gives
up it finds out who stopped first, tells the others through the store, and names that rank.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass

import torch.distributed as dist

from ..core.errors import RankFailed

HEARTBEAT_INTERVAL_S = 0.25
SILENCE_S = 2.0
"""Eight missed heartbeats: far beyond what a busy machine delays a thread."""

VERDICT = "verdict"


@dataclass
class Watch:
    """Heartbeats of this rank, and the means to look at those of the others.

    Args:
        store: The process group's store; keys are prefixed.
        rank: This rank.
        num_ranks: How many there are.
    """

    store: dist.Store
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._store = dist.PrefixStore("stagewright-watch", self.store)
        self._store.set(f"where/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._store.set(f"beat/{self.rank}", "0")
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        self.doing = "setting up"

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(HEARTBEAT_INTERVAL_S):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
            except RuntimeError:
                return  # the store's host is gone; the main thread will find out by itself

    def close(self) -> None:
        """Stop the heartbeat; a rank that ended well is not missed."""
        self._stop.set()
        self._thread.join()

    def failure(self, error: BaseException) -> RankFailed:
        """What to raise in place of a transport error: it names the rank that failed first."""
        doing = f"rank {self.rank} was at {self.doing}"
        try:
            silent = self._verdict() or self._silent_ranks()
            if silent:
                self._store.set(VERDICT, ",".join(map(str, silent)))
            where = {rank: self._where(rank) for rank in silent}
        except RuntimeError:  # the store went away with the process that hosted it
            silent, where = (0,), {0: "host of the store"}
        if not silent:
            return RankFailed(
                f"{doing} and got no answer in time, though every rank is still alive: "
                f"{_first_line(error)}"
            )
        names = ", ".join(f"rank {rank} ({where[rank]})" for rank in silent)
        return RankFailed(
            f"{names} stopped answering; {doing}. Start all ranks again, from the last checkpoint",
            ranks=silent,
        )

    def _verdict(self) -> tuple[int, ...]:
        if not self._store.check([VERDICT]):
            return ()
        return tuple(int(part) for part in self._store.get(VERDICT).decode().split(","))

    def _silent_ranks(self) -> tuple[int, ...]:
        """Ranks whose heartbeat does not move while we look, unless another already knows why."""
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        before = {rank: self._store.get(f"beat/{rank}") for rank in others}
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline:
            if verdict := self._verdict():
                return verdict
            time.sleep(HEARTBEAT_INTERVAL_S / 2)
        return tuple(r for r in others if self._store.get(f"beat/{r}") == before[r])

    def _where(self, rank: int) -> str:
        return self._store.get(f"where/{rank}").decode()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
