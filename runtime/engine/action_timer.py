"""Times of a step's actions, on the clock of the device that performs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...core.plan.schedule import Action
from ..ranks.device_placement import queues_work

Observer = Callable[[Action, float, float], None]
"""Called with each action, its start and its end, in seconds of `time.perf_counter`, when the
actions of a step are done."""

Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class _Span:
    action: Action
    began: Moment
    ended: Moment


class ActionTimer:
    """Stopwatch for the actions of one rank, which it reports to an observer.

    A GPU's host launches actions long before they run. So each is enclosed by events of the compute
    stream, which are read when the step ends. Waiting for the device after each action instead
    could block ranks for ever: the device would also wait for receives posted ahead, whose senders
    may wait for what this rank has not launched yet.
    """

    def __init__(self, device: torch.device, observer: Observer) -> None:
        self._device, self._observer = device, observer
        self._spans: list[_Span] = []
        self._origin: torch.cuda.Event | None = None
        self._origin_s = 0.0

    def begin(self) -> None:
        """Begin a step, dropping what an interrupted one left behind."""
        self._spans.clear()
        origin = self.now()
        if not isinstance(origin, float):
            origin.synchronize()
            self._origin, self._origin_s = origin, time.perf_counter()

    def now(self) -> Moment:
        """Return the moment at which the compute stream has run all that it was given."""
        if not queues_work(self._device):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, action: Action, began: Moment) -> None:
        """Add an action that ends now."""
        self._spans.append(_Span(action, began, self.now()))

    def report(self) -> None:
        """Report the step's actions; waits until a GPU's compute stream has run the last."""
        if self._spans and not isinstance(last := self._spans[-1].ended, float):
            last.synchronize()
        for span in self._spans:
            self._observer(span.action, self._read(span.began), self._read(span.ended))

    def _read(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert self._origin is not None
        milliseconds: float = self._origin.elapsed_time(moment)
        return self._origin_s + milliseconds / 1e3
