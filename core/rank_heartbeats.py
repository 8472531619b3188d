"""Which of several ranks stopped first: heartbeats in a store, and a verdict that all hear.

A rank that dies closes its connections; those it spoke with fail next, and then theirs: the error
a rank sees says little of who began. So every rank shows a heartbeat in the store they meet at, and
the first rank to fail looks whose has stopped, and leaves word for the others. They hear of it with
their next heartbeat, whatever they wait for: the store may leave with the rank that hosts it.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

INTERVAL_S = 0.25
SILENCE_S = 3.0
"""Twelve heartbeats missed: far beyond what a busy machine delays a thread."""

HEARING_S = 10.0
"""How long the first to fail stays so that all others hear why; they need one heartbeat each."""

VERDICT = "verdict"
BETWEEN = " "

MOST_NAMED = 4
"""Ranks of which a message says what they were doing."""

WAITING = "the wait for"
"""How a rank begins to say that it waits for another."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class FailureVerdict:
    """Which ranks failed first, if any, and what happened, in words."""

    ranks: Ranks
    what: str

    def to_json(self) -> str:
        return json.dumps({"ranks": self.ranks, "what": self.what})

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureVerdict:
        data = json.loads(text)
        return cls(tuple(data["ranks"]), data["what"])


class Heartbeats:
    """Heartbeats of this rank, and a look at those of the others.

    Args:
        store: Where all ranks meet, as torch has it, by a connection used for nothing else: while
            one waits in a store, the same connection carries no heartbeat.
        rank: This rank.
        num_ranks: How many there are.
        where: This rank's whereabouts, for the others' errors.
        host: Whose doing it is if the store goes without a word; the rank that has it if `None`,
            which is rank 0.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        *,
        where: str = "",
        host: FailureVerdict | None = None,
    ) -> None:
        self.doing = "setting up"
        """What this rank is at, in words."""
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._host = host or FailureVerdict(
            (0,) if rank else (),
            "rank 0 (host of the store) stopped answering" if rank else "the store is gone",
        )
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heard: FailureVerdict | None = None
        self._store.set(f"where/{rank}", where)
        self._count = 0
        self._show()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._stop, self._thread)

    @property
    def verdict(self) -> FailureVerdict | None:
        """What was found out, here or elsewhere."""
        return self._heard

    def close(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._thread.join()

    def find_out(self) -> FailureVerdict:
        """The ranks that stopped first, as the first to notice found; none if all still answer.

        Takes some seconds: heartbeats have to be missed, and then every rank left has to hear of
        it, since the next to leave may take the store along.
        """
        try:
            if self._heard is None and not self._store.check([VERDICT]):
                self._store.compare_set(VERDICT, "", self._look().to_json())
            verdict = self._hear()
            deadline = time.monotonic() + HEARING_S
            while time.monotonic() < deadline:
                if self._store.add("heard", 0) >= self._num_ranks - len(verdict.ranks):
                    break
                time.sleep(INTERVAL_S / 2)
        except RuntimeError:  # the store is gone
            return self._heard or self._host
        return verdict

    def show(self) -> None:
        """Let the others see at once what this rank is doing."""
        try:
            self._show()
        except RuntimeError:
            return  # the store is gone, and those who would look

    def leave_word(self, what: str) -> None:
        """Let the others know that this rank ends, unless they know of somebody before it."""
        try:
            verdict = FailureVerdict((self._rank,), f"{self._name(self._rank)} {what}")
            self._store.compare_set(VERDICT, "", verdict.to_json())
            self._hear()
        except RuntimeError:
            return  # the store is gone, and those who would read it

    def _hear(self) -> FailureVerdict:
        """The verdict there is; every rank counts itself once among those who know it."""
        with self._lock:
            if self._heard is None:
                self._heard = FailureVerdict.from_json(self._store.get(VERDICT))
                self._store.add("heard", 1)
            return self._heard

    def _look(self) -> FailureVerdict:
        """Whose heartbeat does not move while we look, or what those who are there are doing."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        before = {rank: self._seen(rank) for rank in others}
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline and not self._store.check([VERDICT]):
            time.sleep(INTERVAL_S / 2)
        now = {rank: self._seen(rank) for rank in others}
        silent = tuple(rank for rank in others if now[rank][0] == before[rank][0])
        if silent:
            named = [self._silence(rank, *now[rank]) for rank in silent[:MOST_NAMED]]
            rest = f", and {len(silent) - len(named)} more" if len(silent) > len(named) else ""
            return FailureVerdict(silent, ", ".join(named) + rest)
        at_work = [rank for rank in others if not now[rank][1].startswith(WAITING)]
        told = [f"rank {r} was at {now[r][1]}" for r in (at_work or others)[:MOST_NAMED]]
        return FailureVerdict(
            (),
            f"rank {self._rank} got no answer in time, though every rank is still alive"
            + (f": {', '.join(told)}" if told else ""),
        )

    def _silence(self, rank: int, beats: str, doing: str) -> str:
        if not beats:
            return f"rank {rank} never came: it ended, or still prepares what the others have done"
        return f"{self._name(rank)} stopped answering (last seen at {doing})"

    def _name(self, rank: int) -> str:
        where = self._store.get(f"where/{rank}").decode()
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    def _seen(self, rank: int) -> tuple[str, str]:
        """A rank's heartbeats so far, and what it does; empty if it never showed one.

        A store is not asked for a key that it may not have: that waits for the store's timeout.
        """
        key = f"beat/{rank}"
        shown = self._store.get(key).decode() if self._store.check([key]) else ""
        beats, _, doing = shown.partition(BETWEEN)
        return beats, doing

    def _show(self) -> None:
        self._store.set(f"beat/{self._rank}", f"{self._count}{BETWEEN}{self.doing}")

    def _beat(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._count += 1
            try:
                self._show()
                if self._heard is None and self._store.check([VERDICT]):
                    self._hear()
            except RuntimeError:
                return  # the store is gone; the main thread finds out by itself


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """At exit: a thread inside the store while Python is taken apart would abort the process."""
    stop.set()
    thread.join(SILENCE_S)
