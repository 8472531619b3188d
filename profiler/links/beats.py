"""Which rank of a link measurement stopped first.

A rank that dies closes its connections; those it spoke with fail next, and then theirs: the error
a rank sees says little of who began. So every rank shows a heartbeat in the store they meet at, and
the first rank to fail looks whose has stopped, and leaves word for the others. They hear of it with
their next heartbeat, whatever they wait for: the store may leave with the rank that hosts it.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

INTERVAL_S = 0.25
SILENCE_S = 3.0
"""Twelve heartbeats missed: far beyond what a busy machine delays a thread."""

HEARING_S = 10.0
"""How long the first to fail stays so that all others hear why; they need one heartbeat each."""

VERDICT = "verdict"


class Beats:
    """Heartbeats of this rank, and a look at those of the others.

    Args:
        store: A connection used for nothing else.
        rank: This rank.
        num_ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heard: tuple[int, ...] | None = None
        self._store.set(self._key(rank), "0")
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat."""
        self._stop.set()
        self._thread.join()

    def lost(self) -> tuple[int, ...]:
        """Ranks that stopped first, as the first to notice found; none if all still answer.

        Takes some seconds: heartbeats have to be missed, and then every rank left has to hear of
        it, since the next to leave may take the store along.
        """
        try:
            return self._verdict()
        except RuntimeError:  # the store is gone, with rank 0 or the launcher that hosts it
            if self._heard is not None:
                return self._heard
            return (0,) if self._rank else ()

    def _verdict(self) -> tuple[int, ...]:
        self._store.compare_set(VERDICT, "", json.dumps(self._silent()))
        lost = self._hear()
        deadline = time.monotonic() + HEARING_S
        while time.monotonic() < deadline:
            if self._store.add("heard", 0) >= self._num_ranks - len(lost):
                break
            time.sleep(INTERVAL_S / 2)
        return lost

    def _hear(self) -> tuple[int, ...]:
        """The verdict there is; every rank counts itself once among those who know it."""
        with self._lock:
            if self._heard is None:
                self._heard = tuple(json.loads(self._store.get(VERDICT)))
                self._store.add("heard", 1)
            return self._heard

    def _silent(self) -> list[int]:
        """Ranks whose heartbeat does not move while we look; none if there is a verdict."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        before = {rank: self._seen(rank) for rank in others}
        deadline = time.monotonic() + SILENCE_S
        while time.monotonic() < deadline and not self._store.check([VERDICT]):
            time.sleep(INTERVAL_S / 2)
        return [rank for rank in others if self._seen(rank) == before[rank]]

    def _seen(self, rank: int) -> bytes:
        key = self._key(rank)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(INTERVAL_S):
            count += 1
            try:
                self._store.set(self._key(self._rank), str(count))
                if self._heard is None and self._store.check([VERDICT]):
                    self._hear()
            except RuntimeError:
                return

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"
