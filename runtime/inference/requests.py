"""Requests from submission to their results: numbering, back-pressure and delivery."""

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
from .batching import BatchSplit, BatchSplitter
from .microbatch import InFlightMicrobatch, OrderedQueue, Values
from .stage_device import current_streams, record_ready, record_use
from .stage_worker import QueueWorker


@dataclass
class PendingRequest:
    """Request whose micro-batches are in flight.

    Attributes:
        future: Future of the model's output.
        split: The batch, split into micro-batches.
        streams: The caller's current CUDA stream by device.
        outputs: Outputs of the micro-batches that passed all stages.
        error: Error of the first micro-batch that failed.
    """

    future: Future[Any]
    split: BatchSplit
    streams: dict[torch.device, torch.cuda.Stream]
    outputs: list[Values] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def is_wanted(self) -> bool:
        return self.error is None and not self.future.cancelled()


class RequestDispatcher:
    """Dispatcher that numbers micro-batches, bounds those in flight, and delivers results.

    Micro-batches return in the order of their numbers, so that requests complete in the order in
    which they were submitted.

    ``feed`` is called with each micro-batch, in order, to send it to the first stage; ``results``
    gets those that passed the last one.
    """

    def __init__(
        self,
        cut_model: CutModel,
        plan: Plan,
        feed: Callable[[InFlightMicrobatch], None],
        results: OrderedQueue,
        max_in_flight: int,
        *,
        pad: bool,
    ) -> None:
        self._captured = cut_model.captured
        self._splitter = BatchSplitter(cut_model.captured, plan.inputs, pad=pad)
        self._changes_input = cut_model.captured.mutates_inputs(0, plan.balance[0])
        self._feed, self._max_in_flight = feed, max_in_flight
        self._submitting = threading.Lock()
        self._changed = threading.Condition()
        self._in_flight: deque[PendingRequest] = deque()
        self._numbered = self._delivered = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._deliverer = QueueWorker("results", results, self._deliver, self.fail)

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of micro-batches that were sent and that returned."""
        with self._changed:
            return self._numbered, self._delivered

    def submit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Submit a batch; wait while too many micro-batches are in flight."""
        if threading.current_thread() is self._deliverer.thread:
            raise InvalidInput(
                "submit was called in a result's callback, on the thread that delivers all "
                "results, which would wait for itself; submit from another thread"
            )
        flat = self._captured.structure.flatten(tuple(args), kwargs)
        request = PendingRequest(Future(), self._splitter.split(flat), current_streams())
        ready = record_ready(flat)
        # One request at a time, so that its micro-batches have consecutive numbers.
        with self._submitting:
            for values in request.split.microbatches:
                if self._changes_input:  # the first stage would overwrite the caller's tensors
                    values = tuple(value.clone() for value in values)
                self._feed(self._admit(request, values, ready))
        return request.future

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the outputs of a stream of batches, in order; see `InferencePipeline.map`."""
        waiting: deque[Future[Any]] = deque()
        try:
            for batch in batches:
                waiting.append(self.submit(*self._captured.structure.split_call(batch)))
                while waiting and (waiting[0].done() or len(waiting) >= self._max_in_flight):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def fail(self, error: BaseException) -> None:
        """Fail all requests in flight, and all later ones, with this error."""
        with self._changed:
            self._failure = self._failure or error
            # By identity: a request is listed once for each of its micro-batches.
            in_flight = {id(request): request for request in self._in_flight}
            self._in_flight.clear()
            self._changed.notify_all()
        # Outside the lock: a future's callbacks run here and may call this object.
        for request in in_flight.values():
            _settle(request.future, error=self._failure)

    def close(self, *, is_abandoned: bool = False) -> None:
        """Accept no more requests and wait for those in flight, cancelled if abandoned."""
        with self._changed:
            self._is_closed = True
            if is_abandoned:
                for request in self._in_flight:
                    request.future.cancel()
            self._changed.wait_for(self._is_idle)
        self._deliverer.end()
        self._deliverer.thread.join()

    def _is_idle(self) -> bool:
        return self._failure is not None or self._delivered == self._numbered

    def _admit(
        self, request: PendingRequest, values: Values, ready: torch.cuda.Event | None
    ) -> InFlightMicrobatch:
        """Assign the next number, once fewer than the maximum are in flight."""
        with self._changed:
            self._changed.wait_for(self._has_room)
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise InvalidInput("this pipeline is closed; create a new one")
            number = self._numbered
            self._numbered += 1
            # Under the lock that assigns the number: results return in this order, and `_deliver`
            # finds their request at the front.
            self._in_flight.append(request)
        return InFlightMicrobatch(number, values, ready, is_wanted=lambda: request.is_wanted)

    def _has_room(self) -> bool:
        in_flight = self._numbered - self._delivered
        return self._failure is not None or self._is_closed or in_flight < self._max_in_flight

    def _deliver(self, microbatch: InFlightMicrobatch) -> None:
        """Record a micro-batch's outputs; complete its request if it was the last one."""
        if microbatch.ready is not None:
            # Outside the lock, or callers of `submit` would wait for the GPU, too.
            microbatch.ready.synchronize()
        with self._changed:
            if self._failure is not None:
                return
            request = self._in_flight.popleft()
            request.error = request.error or microbatch.error
            request.outputs.append(microbatch.values)
        # Completed before it is counted, so that close() returns after the last future is done.
        if len(request.outputs) == len(request.split.sizes):
            self._complete(request)
        with self._changed:
            self._delivered += 1
            self._changed.notify_all()

    def _complete(self, request: PendingRequest) -> None:
        if request.error is not None:
            _settle(request.future, error=request.error)
            return
        try:
            flat = request.split.join(request.outputs)
            for value in flat:
                record_use(value, request.streams)
            output = self._captured.unflatten_output(flat)
        except Exception as error:  # noqa: BLE001 (it is raised where the result is read)
            _settle(request.future, error=error)
        else:
            _settle(request.future, output)


def _settle(future: Future[Any], output: Any = None, *, error: BaseException | None = None) -> None:
    """Complete a future, unless it was cancelled."""
    # Also bars later cancellation, which could otherwise come before the result is set.
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(output)
