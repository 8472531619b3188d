"""Heartbeat-based failure detector that determines which rank failed first.

A rank that dies closes its connections; its peers fail next, and then theirs, so the error that a
rank sees says little about the origin. Every rank therefore writes a heartbeat to the shared store.
The first rank to fail looks for heartbeats that have stopped and writes a verdict; the others read
it with their next heartbeat, because the store may disappear together with the rank that hosts it.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

INTERVAL_S = 0.25
SILENCE_S = 3.0
"""Twelve missed heartbeats: far more than a busy machine delays a thread."""

DEAD_S = 20.0
"""Silence of a rank that is waited for after which it is taken for dead. Longer than `SILENCE_S`,
since nothing else has failed: while it captures a large model, one operation may hold up all its
threads."""

HEARING_S = 10.0
"""Longest time a failed rank stays until all others have read the verdict; each needs one beat."""

FAREWELL_S = 5.0
"""Longest time that rank 0 waits for others to finish. They are a step behind it at most, unless
they go on with work of their own."""

VERDICT = "verdict"
BETWEEN = " "

MOST_NAMED = 4
"""Most ranks whose activity a message describes."""

WAITING = "the wait for"
"""Beginning of the activity of a rank that waits for another."""

Ranks = tuple[int, ...]


class StoreSilent(RuntimeError):
    """The store leaves requests waiting, as when its host is stopped."""


@dataclass(frozen=True)
class FailureVerdict:
    """The ranks that failed first, empty if all are alive, and a description."""

    ranks: Ranks
    what: str

    def to_json(self) -> str:
        return json.dumps({"ranks": self.ranks, "what": self.what})

    @classmethod
    def from_json(cls, text: str | bytes) -> FailureVerdict:
        data = json.loads(text)
        return cls(tuple(data["ranks"]), data["what"])


class Heartbeats:
    """Publisher of this rank's heartbeat and watcher of the others'.

    Args:
        store: A ``torch.distributed`` store shared by all ranks, over a connection of its own: a
            call that waits in a store blocks every other call on the same connection.
        rank: This rank.
        num_ranks: Number of ranks.
        where: Host and process of this rank, for the others' messages.
        host: Verdict if the store disappears; by default that rank 0, which hosts it, has failed.
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
        self.activity = "setting up"
        """This rank's current activity, in words."""
        self.has_lost_store = False
        """Whether the store broke the connection; verdicts no longer arrive then."""
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._host = host or FailureVerdict(
            (0,) if rank else (),
            "rank 0 (host of the store) stopped answering" if rank else "the store is gone",
        )
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heard: FailureVerdict | None = None
        self._last_beat_s = time.monotonic()
        self._store.set(f"where/{rank}", where)
        self._count = 0
        self._show()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, self._stop, self._thread)

    @property
    def verdict(self) -> FailureVerdict | None:
        """Return the verdict that this or another rank has reached, if any."""
        return self._heard

    @property
    def _silence_s(self) -> float:
        """Return the time since the store last answered a heartbeat."""
        return time.monotonic() - self._last_beat_s

    def close(self) -> None:
        """Stop the heartbeat, and wait for it unless the store leaves it waiting."""
        self._stop.set()
        while self._thread.is_alive() and self._silence_s < SILENCE_S:
            self._thread.join(INTERVAL_S)

    def say_farewell(self) -> None:
        """Say that this rank has finished; rank 0 waits until all have, for `FAREWELL_S` at most.

        It may host the store, where the others read at the end of their last step what ranks were
        given for it, and would take its end for a failure.
        """

        def leave() -> None:
            self._store.add("finished", 1)
            deadline = time.monotonic() + FAREWELL_S
            while self._rank == 0 and self._heard is None and time.monotonic() < deadline:
                if self._store.add("finished", 0) >= self._num_ranks:
                    return
                time.sleep(INTERVAL_S / 25)

        with suppress(RuntimeError):  # the store is gone: nobody is left to wait for
            self._ask(leave)

    def find_out(self) -> FailureVerdict:
        """Determine the ranks that failed first; block until the others have read the verdict.

        This takes some seconds: first heartbeats must be missed, then every surviving rank must
        read the verdict, since the next to exit may host the store.
        """
        try:
            return self._ask(self._find_out)
        except RuntimeError:  # torch's stores raise it when the connection breaks
            return self._heard or self._host

    def find_silent(self) -> None:
        """Reach a verdict, as `find_out` does, if heartbeats have stopped; block for seconds."""

        def look() -> None:
            if (found := self._look()).ranks:
                self._find_out(found)

        with suppress(RuntimeError):  # the store is gone, and with it the other ranks
            self._ask(look)

    def _find_out(self, found: FailureVerdict | None = None) -> FailureVerdict:
        # compare_set: of several ranks that look at once, the first to finish decides for all.
        if self._heard is None and not self._store.check([VERDICT]):
            self._store.compare_set(VERDICT, "", (found or self._look()).to_json())
        verdict = self._hear()
        self._await_hearing(self._num_ranks - len(verdict.ranks), HEARING_S)
        return verdict

    def await_verdict(self, timeout_s: float) -> FailureVerdict | None:
        """Wait until a rank has reached a verdict; return `None` if none does in time."""
        deadline = time.monotonic() + timeout_s
        while self._heard is None and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 4)
        return self._heard

    def publish(self, key: str, value: str) -> None:
        """Set a value that all ranks can read."""
        self._ask(lambda: self._store.set(key, value))

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """Return published values; `None` for those that are not there yet."""

        def read_present() -> list[str | None]:
            check, get = self._store.check, self._store.get
            if self._store.has_extended_api() and check(list(keys)):
                return [value.decode() for value in self._store.multi_get(list(keys))]
            return [get(key).decode() if check([key]) else None for key in keys]

        return self._ask(read_present)

    def wait_for(self, key: str, timeout_s: float, rank: int) -> str | None:
        """Return a value that a rank publishes; `None` if it has died or the time is over."""

        def poll() -> str | None:
            deadline, pause_s = time.monotonic() + timeout_s, 0.001
            seen, seen_at_s = self._seen(rank), time.monotonic()
            while not self._store.check([key]):
                now_s = time.monotonic()
                if (shown := self._seen(rank)) != seen or not shown[0]:
                    seen, seen_at_s = shown, now_s
                is_silent = now_s - seen_at_s > DEAD_S
                is_over = is_silent or now_s > deadline or self._store.check([VERDICT])
                # Looked for again: a rank may publish its value first and fail then.
                if is_over and not self._store.check([key]):
                    return None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, INTERVAL_S / 2)
            value: str = self._store.get(key).decode()
            return value

        return self._ask(poll)

    def show(self) -> None:
        """Publish this rank's current activity at once."""
        try:
            self._ask(self._show)
        except RuntimeError:
            return  # the store is gone, and with it the other ranks

    def leave_word(self, what: str) -> None:
        """Announce that this rank fails, unless another rank failed before it."""
        try:
            self._ask(lambda: self._leave_word(what))
        except RuntimeError:
            return  # the store is gone, and with it the other ranks

    def _leave_word(self, what: str) -> None:
        verdict = FailureVerdict((self._rank,), f"{self._name(self._rank)} {what}")
        self._store.compare_set(VERDICT, "", verdict.to_json())
        self._hear()
        # This rank may host the store, and end next: the others could not read why.
        self._await_hearing(self._num_ranks - 1, SILENCE_S)

    def _await_hearing(self, num_ranks: int, timeout_s: float) -> None:
        """Wait until this many ranks have read the verdict."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._store.add("heard", 0) < num_ranks:
            time.sleep(INTERVAL_S / 4)

    def _ask(self, request: Callable[[], T]) -> T:
        """Return the result of a request to the store.

        Requests of torch's stores have no timeout: a host that is stopped, but not dead, keeps its
        connections open and leaves them waiting for ever. So they are made in a thread of their
        own, which is abandoned once heartbeats are not answered either.

        Raises:
            StoreSilent: It was abandoned.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:  # noqa: BLE001 (raised in the calling thread)
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([answer], INTERVAL_S).done:
            if self._silence_s > SILENCE_S and not self._stop.is_set():
                raise StoreSilent(f"the store has not answered for {self._silence_s:.1f} s")
        return answer.result()

    def _hear(self) -> FailureVerdict:
        """Read the verdict, counting this rank once among those that have."""
        # The heartbeat thread and the main thread both come here; the count must rise only once.
        with self._lock:
            if self._heard is None:
                self._heard = FailureVerdict.from_json(self._store.get(VERDICT))
                # A rank that left word of its own error is not among those that others wait for.
                if self._rank not in self._heard.ranks:
                    self._store.add("heard", 1)
            return self._heard

    def _look(self) -> FailureVerdict:
        """Watch the other heartbeats for `SILENCE_S` and return a verdict."""
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
        # All are alive. A rank that waits is a victim, so name those that do something else.
        at_work = [rank for rank in others if not now[rank][1].startswith(WAITING)]
        told = [f"rank {r} was at {now[r][1]}" for r in (at_work or others)[:MOST_NAMED]]
        return FailureVerdict(
            (),
            f"rank {self._rank} got no answer in time, though every rank is still alive"
            + (f": {', '.join(told)}" if told else ""),
        )

    def _silence(self, rank: int, beats: str, activity: str) -> str:
        if not beats:
            return f"rank {rank} never joined: it exited, or is still being set up"
        return f"{self._name(rank)} stopped answering (last seen at {activity})"

    def _name(self, rank: int) -> str:
        where = self._store.get(f"where/{rank}").decode()
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    def _seen(self, rank: int) -> tuple[str, str]:
        """Return a rank's heartbeat count and activity; empty strings before its first one."""
        # `get` of a missing key blocks until the store's timeout, so ask `check` first.
        key = f"beat/{rank}"
        shown = self._store.get(key).decode() if self._store.check([key]) else ""
        beats, _, activity = shown.partition(BETWEEN)
        return beats, activity

    def _show(self) -> None:
        self._store.set(f"beat/{self._rank}", f"{self._count}{BETWEEN}{self.activity}")

    def _beat(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._count += 1
            try:
                self._show()
                self._last_beat_s = time.monotonic()
                if self._heard is None and self._store.check([VERDICT]):
                    self._hear()
            except RuntimeError:
                self.has_lost_store = True
                return


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    # At exit: a thread inside the store's C++ code during interpreter shutdown aborts the process.
    stop.set()
    if thread is not threading.current_thread():  # which may be the last to hold the heartbeat
        thread.join(SILENCE_S)
