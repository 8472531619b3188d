"""One rank's part of the traffic: pieces come in, are worked on, and go on to other ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

from ...core.plan.schedule import Schedule
from .microbatch import Inbox, Piece
from .stage_worker import StageWork, Worker
from .transport import Letter, Letters

FEEDER = 0
"""The rank that takes requests and hands out results."""

LOOK_INTERVAL_S = 0.25


class Station:
    """The threads of a rank: one a stage, one a connection to receive by, and one that sends.

    Args:
        schedule: Which rank holds which stage; its order of work is not used.
        rank: This one.
        letters: To and from the others.
        says: Told in words what this rank does next, for errors.
        failed: Told what ended a thread.

    Attributes:
        outcome: On rank 0, where pieces that are through are left.
        dismissed: Set once rank 0 needs this rank no more.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        letters: Letters,
        says: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._schedule, self._rank, self._letters = schedule, rank, letters
        self._says, self._failed = says, failed
        self.outcome = Inbox()
        self.dismissed = threading.Event()
        places = schedule.stage_ranks
        self._inboxes = {
            index: Inbox(places[index].index(rank), len(places[index]))
            for index in schedule.stages_of(rank)
        }
        self._inboxes[len(places)] = self.outcome
        self._outbox: queue.SimpleQueue[tuple[int, Letter] | None] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []

    def open(self, works: Mapping[int, StageWork]) -> None:
        """Begin to serve.

        Args:
            works: This rank's stages by index.
        """
        self._workers = [
            Worker(
                f"stage {index}",
                self._inboxes[index],
                partial(self._work, work, index),
                self._failed,
            )
            for index, work in works.items()
        ]
        self._threads = [
            self._start(f"from rank {sender}", partial(self._receive, sender))
            for sender, receiver in connections(self._schedule)
            if receiver == self._rank
        ]
        self._threads.append(self._start("outbox", self._send))

    def feed(self, piece: Piece) -> None:
        """Send a piece to the first stage."""
        self._pass_on(0, piece)

    def close(self, until: Callable[[], bool]) -> None:
        """End the threads, with a last letter over every connection, here and there.

        Args:
            until: Whether to give up, because some will never end.
        """
        for worker in self._workers:
            worker.end()
        for sender, receiver in connections(self._schedule):
            if sender == self._rank:
                self._outbox.put((receiver, Letter(0, None)))
        self._outbox.put(None)
        for thread in (*self._threads, *(worker.thread for worker in self._workers)):
            while thread.is_alive() and not until():
                thread.join(LOOK_INTERVAL_S)

    def _work(self, work: StageWork, index: int, piece: Piece) -> None:
        self._says(f"the forward of micro-batch {piece.number} on stage {index}")
        made = work.through(piece)
        self._says(f"the wait behind micro-batch {piece.number} on stage {index}")
        self._pass_on(index + 1, made)

    def _pass_on(self, place: int, piece: Piece) -> None:
        is_last = place == self._schedule.num_stages
        rank = FEEDER if is_last else self._schedule.rank_of(place, piece.number)
        if rank == self._rank:
            self._inboxes[place].put(piece)
        else:
            self._outbox.put((rank, Letter(place, piece)))

    def _send(self) -> None:
        while (addressed := self._outbox.get()) is not None:
            self._letters.send(*addressed)
            del addressed

    def _receive(self, sender: int) -> None:
        while (letter := self._letters.receive(sender)).piece is not None:
            self._inboxes[letter.place].put(letter.piece)
            del letter
        if sender == FEEDER:
            self.dismissed.set()

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (a thread has nobody to raise to)
                self._failed(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def connections(schedule: Schedule) -> list[tuple[int, int]]:
    """Sender and receiver of all letters: stage to stage, and rank 0 to and from the ends.

    Rank 0 has a connection to every rank, to dismiss it by.
    """
    places = [(FEEDER,), *schedule.stage_ranks, (FEEDER,)]
    pairs = {(a, b) for here, there in pairwise(places) for a in here for b in there}
    pairs.update((FEEDER, rank) for rank in range(len(schedule.ranks)))
    return sorted((a, b) for a, b in pairs if a != b)
