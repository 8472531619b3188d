"""Requests from the moment they are submitted until their results are handed out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..partition.cut import CutModel
from .batching import Split, Splitter, call_of
from .microbatch import Inbox, Piece, Values
from .stage_device import current_streams, keep_for, submitted
from .stage_worker import Worker


@dataclass
class Request:
    """A batch on its way, in pieces.

    Attributes:
        future: Of the model's output.
        split: The pieces.
        streams: Those that the caller works on.
        outputs: Of the pieces that are through.
        error: Of the first piece that failed.
    """

    future: Future[Any]
    split: Split
    streams: dict[torch.device, torch.cuda.Stream]
    outputs: list[Values] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def is_wanted(self) -> bool:
        return self.error is None and not self.future.cancelled()


class Requests:
    """Numbers the pieces of requests, bounds how many are under way, and hands out results.

    Pieces come back in the order of their numbers, so requests end in the order in which they
    were submitted.

    Args:
        pieces: The model, cut.
        plan: Says how large a piece is.
        feed: Given each piece, in order, to bring it to the first stage.
        outcome: Where the last stage leaves pieces.
        max_in_flight: Pieces under way at once.
        pad: See `Splitter`.
    """

    def __init__(
        self,
        pieces: CutModel,
        plan: Plan,
        feed: Callable[[Piece], None],
        outcome: Inbox,
        max_in_flight: int,
        *,
        pad: bool,
    ) -> None:
        self._captured = pieces.captured
        self._splitter = Splitter(pieces.captured, plan.inputs, pad=pad)
        self._changes_input = pieces.captured.mutates_inputs(0, plan.balance[0])
        self._feed, self._max_in_flight = feed, max_in_flight
        self._submitting = threading.Lock()
        self._changed = threading.Condition()
        self._under_way: deque[Request] = deque()
        self._numbered = self._delivered = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._deliverer = Worker("results", outcome, self._deliver, self.fail)

    @property
    def progress(self) -> tuple[int, int]:
        """Pieces that were sent on their way, and pieces that came back."""
        with self._changed:
            return self._numbered, self._delivered

    def submit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Send a batch on its way; waits while too many are under way.

        Raises:
            InvalidInput: The batch is not what the model takes, or nothing is taken any more.
            RankFailed: A process is gone.
        """
        if threading.current_thread() is self._deliverer.thread:
            raise InvalidInput(
                "submit was called by the callback of a result, whose thread hands out all results "
                "and would wait for itself; submit from another thread"
            )
        flat = self._captured.structure.flatten(tuple(args), kwargs)
        request = Request(Future(), self._splitter.split(flat), current_streams())
        ready = submitted(flat)
        with self._submitting:
            for values in request.split.pieces:
                if self._changes_input:  # the caller's own, which the first stage would change
                    values = tuple(value.clone() for value in values)
                self._feed(self._admitted(request, values, ready))
        return request.future

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs of a stream of batches, in order; see `InferencePipeline.map`."""
        waiting: deque[Future[Any]] = deque()
        try:
            for batch in batches:
                waiting.append(self.submit(*call_of(batch)))
                while waiting and (waiting[0].done() or len(waiting) >= self._max_in_flight):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def fail(self, error: BaseException) -> None:
        """Nothing can go on: every request that is under way, or comes, ends with this error."""
        with self._changed:
            self._failure = self._failure or error
            under_way = {id(request): request for request in self._under_way}
            self._under_way.clear()
            self._changed.notify_all()
        for request in under_way.values():
            _settle(request.future, error=self._failure)

    def close(self, *, is_abandoned: bool = False) -> None:
        """Take no more requests, and wait until those under way are through.

        Args:
            is_abandoned: Cancel them first.
        """
        with self._changed:
            self._is_closed = True
            if is_abandoned:
                for request in self._under_way:
                    request.future.cancel()
            self._changed.wait_for(self._is_idle)
        self._deliverer.end()
        self._deliverer.thread.join()

    def _is_idle(self) -> bool:
        return self._failure is not None or self._delivered == self._numbered

    def _admitted(self, request: Request, values: Values, ready: torch.cuda.Event | None) -> Piece:
        """The next piece, once there is room for it."""
        with self._changed:
            self._changed.wait_for(self._has_room)
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise InvalidInput("this pipeline is closed; make another one")
            number = self._numbered
            self._numbered += 1
            self._under_way.append(request)
        return Piece(number, values, ready, is_wanted=lambda: request.is_wanted)

    def _has_room(self) -> bool:
        under_way = self._numbered - self._delivered
        return self._failure is not None or self._is_closed or under_way < self._max_in_flight

    def _deliver(self, piece: Piece) -> None:
        """Take a piece from the last stage, and end its request if it was the last one."""
        if piece.ready is not None:
            piece.ready.synchronize()
        with self._changed:
            if self._failure is not None:
                return
            request = self._under_way.popleft()
            request.error = request.error or piece.error
            request.outputs.append(piece.values)
        if len(request.outputs) == len(request.split.sizes):
            self._end(request)
        with self._changed:
            self._delivered += 1
            self._changed.notify_all()

    def _end(self, request: Request) -> None:
        if request.error is not None:
            _settle(request.future, error=request.error)
            return
        try:
            flat = request.split.join(request.outputs)
            for value in flat:
                keep_for(value, request.streams)
            output = self._captured.unflatten_output(flat)
        except Exception as error:  # noqa: BLE001 (it is raised where the result is read)
            _settle(request.future, error=error)
        else:
            _settle(request.future, output)


def _settle(future: Future[Any], output: Any = None, *, error: BaseException | None = None) -> None:
    """End a request, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(output)
