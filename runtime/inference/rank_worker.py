"""Threads of one rank: receiving micro-batches, running stages, and sending results on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

from ...core.plan.schedule import Schedule
from .microbatch import InFlightMicrobatch, OrderedQueue
from .stage_worker import InferenceStage, QueueWorker, start_thread
from .transport import MicrobatchTransport, WireMessage

REQUEST_RANK = 0
"""The rank that accepts requests and returns results."""

POLL_INTERVAL_S = 0.25


class RankWorker:
    """Owner of a rank's threads: one per stage, one per incoming connection, and one for sending.

    A single sending thread keeps the messages of a connection in order, and stages never wait for
    the network.

    Attributes:
        results: On rank 0, queue of the micro-batches that passed the last stage.
        dismissed: Set once rank 0 no longer needs this rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: MicrobatchTransport,
        set_activity: Callable[[str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._schedule, self._rank, self._transport = schedule, rank, transport
        self._set_activity, self._on_error = set_activity, on_error
        self.results = OrderedQueue()
        self.dismissed = threading.Event()
        holders = schedule.stage_ranks
        self._queues = {
            index: OrderedQueue(holders[index].index(rank), len(holders[index]))
            for index in schedule.stages_of(rank)
        }
        self._queues[len(holders)] = self.results
        self._outbox: queue.SimpleQueue[tuple[int, WireMessage] | None] = queue.SimpleQueue()
        self._workers: list[QueueWorker] = []
        self._threads: list[threading.Thread] = []

    def open(self, runners: Mapping[int, InferenceStage]) -> None:
        """Start all threads, those of this rank's stages by index among them."""
        self._workers = [
            QueueWorker(
                f"stage {index}",
                self._queues[index],
                partial(self._run_stage, runner, index),
                self._on_error,
            )
            for index, runner in runners.items()
        ]
        self._threads = [
            start_thread(f"from rank {sender}", partial(self._receive, sender), self._on_error)
            for sender, receiver in list_connections(self._schedule)
            if receiver == self._rank
        ]
        self._threads.append(start_thread("outbox", self._send, self._on_error))

    def feed(self, microbatch: InFlightMicrobatch) -> None:
        """Send a micro-batch to the first stage."""
        self._pass_on(0, microbatch)

    def close(self, until: Callable[[], bool]) -> None:
        """End the threads on both sides of every connection by a final message.

        ``until`` returns True to stop waiting, because some threads will never end.
        """
        for worker in self._workers:
            worker.end()
        for sender, receiver in list_connections(self._schedule):
            if sender == self._rank:
                self._outbox.put((receiver, WireMessage(0, None)))
        # Behind the final messages, so that these still leave.
        self._outbox.put(None)
        for thread in (*self._threads, *(worker.thread for worker in self._workers)):
            while thread.is_alive() and not until():
                thread.join(POLL_INTERVAL_S)

    def _run_stage(
        self, runner: InferenceStage, index: int, microbatch: InFlightMicrobatch
    ) -> None:
        self._set_activity(f"the forward of micro-batch {microbatch.number} on stage {index}")
        outputs = runner.run(microbatch)
        self._set_activity(f"the wait after micro-batch {microbatch.number} on stage {index}")
        self._pass_on(index + 1, outputs)

    def _pass_on(self, stage: int, microbatch: InFlightMicrobatch) -> None:
        is_last = stage == self._schedule.num_stages
        rank = REQUEST_RANK if is_last else self._schedule.rank_of(stage, microbatch.number)
        if rank == self._rank:
            self._queues[stage].put(microbatch)
        else:
            self._outbox.put((rank, WireMessage(stage, microbatch)))

    def _send(self) -> None:
        while (addressed := self._outbox.get()) is not None:
            self._transport.send(*addressed)
            del addressed  # or its tensors would stay allocated until the next message

    def _receive(self, sender: int) -> None:
        while (message := self._transport.receive(sender)).microbatch is not None:
            self._queues[message.stage].put(message.microbatch)
            del message
        # Rank 0 is connected to every rank, so that its final message dismisses all of them.
        if sender == REQUEST_RANK:
            self.dismissed.set()


def list_connections(schedule: Schedule) -> list[tuple[int, int]]:
    """Return sender and receiver of every connection.

    Stages are connected to the next, rank 0 to the first and from the last, and rank 0 to every
    rank for its dismissal.
    """
    holders = [(REQUEST_RANK,), *schedule.stage_ranks, (REQUEST_RANK,)]
    pairs = {(a, b) for here, there in pairwise(holders) for a in here for b in there}
    pairs.update((REQUEST_RANK, rank) for rank in range(len(schedule.ranks)))
    return sorted((a, b) for a, b in pairs if a != b)
