"""Who is still there: heartbeats between ranks, and a verdict when one is not.

A rank that dies closes its connections, and its neighbours' next wait fails with the transport's
own words. Ranks further away fail later, because their neighbour ended. So before a rank gives
up it finds out who stopped first, tells the others through the store, and names that rank.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from ..core.errors import RankFailed, StagewrightError, first_line

HEARTBEAT_INTERVAL_S = 0.25
SILENCE_S = 2.0
"""Eight missed heartbeats: far beyond what a busy machine delays a thread."""

VERDICT = "verdict"

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """Which ranks failed first, if any, and what happened, in words."""

    ranks: Ranks
    what: str

    def to_json(self) -> str:
        return json.dumps({"ranks": self.ranks, "what": self.what})

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        data = json.loads(text)
        return cls(tuple(data["ranks"]), data["what"])


@dataclass
class Watch:
    """Heartbeats of this rank, and the means to look at those of the others.

    Args:
        store: The process group's store; keys are prefixed.
        rank: This rank.
        num_ranks: How many there are.
        group: The ranks' process group; each group, and each watch of one group in the order
            they are made, has keys of its own.
    """

    store: Store
    rank: int
    num_ranks: int
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.doing = "setting up"
        self.diagnosing = False
        """Whether it is finding out which rank failed."""
        self._verdict: Verdict | None = None
        self._stop = threading.Event()
        name = f"stagewright-watch/{self.group.group_name if self.group else 'default'}"
        number = self.store.add(f"{name}/watches of rank {self.rank}", 1)
        self._store = PrefixStore(f"{name}/{number}", self.store)
        self._store.set(f"where/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._store.set(f"beat/{self.rank}", "0")
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def says(self, doing: str) -> None:
        """What this rank does next, for errors."""
        self.doing = doing

    @property
    def has_verdict(self) -> bool:
        """Whether some rank found out who failed."""
        return self._verdict is not None

    def close(self) -> None:
        """Stop the heartbeat; a rank that ended well is not missed."""
        self._stop.set()
        self._thread.join()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a transport's error into one that names the rank that failed."""
        try:
            yield
        except StagewrightError:
            raise
        except RuntimeError as error:
            if not _is_transport(error):
                raise
            self.diagnosing = True
            try:
                failure = self.failure(error)
            finally:
                self.diagnosing = False
            raise failure from error

    def failure(self, error: BaseException) -> RankFailed:
        """What to raise in place of a transport error: it names the rank that failed first.

        Takes a few seconds: it waits for heartbeats to be missed, and then until every rank that
        still answers has heard who failed, since the next to leave may take the store along.
        """
        try:
            if self._verdict is None:
                silent = self._silent_ranks()
                if self._verdict is None:
                    self._tell_others(silent)
        except RuntimeError:
            self._verdict = self._verdict or _store_host()
        assert self._verdict is not None
        return RankFailed(
            f"{self._verdict.what}; rank {self.rank} was at {self.doing} ({first_line(error)}). "
            "Start all ranks again, from the last checkpoint",
            ranks=self._verdict.ranks,
        )

    def _beat(self) -> None:
        """Show this rank alive, and listen for a verdict even while the main thread waits."""
        count = 0
        while not self._stop.wait(HEARTBEAT_INTERVAL_S):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
                if self._verdict is None and self._store.check([VERDICT]):
                    self._verdict = Verdict.from_json(self._store.get(VERDICT).decode())
                    self._store.set(f"knows/{self.rank}", "1")
            except RuntimeError:
                return  # the store's host is gone; the main thread finds out by itself

    def _silent_ranks(self) -> Ranks:
        """Ranks whose heartbeat does not move while we look; none if another tells us first."""
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        before = {rank: self._store.get(f"beat/{rank}") for rank in others}
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline:
            if self._verdict is not None:
                return ()
            time.sleep(HEARTBEAT_INTERVAL_S / 2)
        return tuple(r for r in others if self._store.get(f"beat/{r}") == before[r])

    def _tell_others(self, silent: Ranks) -> None:
        where = [self._store.get(f"where/{rank}").decode() for rank in silent]
        who = ", ".join(f"rank {r} ({place})" for r, place in zip(silent, where, strict=True))
        self._verdict = Verdict(
            silent,
            f"{who} stopped answering"
            if silent
            else f"rank {self.rank} got no answer in time, though every rank is still alive",
        )
        self._store.set(VERDICT, self._verdict.to_json())
        self._store.set(f"knows/{self.rank}", "1")
        waiting = [f"knows/{rank}" for rank in range(self.num_ranks) if rank not in silent]
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline and not self._store.check(waiting):
            time.sleep(HEARTBEAT_INTERVAL_S / 2)


def _store_host() -> Verdict:
    """Who is to blame when the store itself is gone, and nobody said anything before."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Verdict((), "the launcher, which hosts the store, stopped answering")
    return Verdict((0,), "rank 0 (host of the store) stopped answering")


_TRANSPORT_WORDS = (
    "connection", "timed out", "timeout", "gloo", "nccl", "broken pipe", "socket", "store", "peer",
)  # fmt: skip


def _is_transport(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, came from communication rather than from the model."""
    while error is not None:
        if isinstance(error, DistError):
            return True
        text = str(error).lower()
        if not isinstance(error, StagewrightError) and any(
            word in text for word in _TRANSPORT_WORDS
        ):
            return True
        error = error.__cause__
    return False
