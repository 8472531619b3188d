"""Time on a device, read the same way everywhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import quantiles

import torch

from ...core.profile.profile import Timing
from .memory import ON_CUDA

SLEEP_CYCLES_PER_S = 2.0e9
"""Clock cycles in a second of `Clock.head_start`; a slower GPU merely sleeps longer."""


@dataclass(frozen=True)
class Mark:
    """A point in a device's work, and when the host had issued it.

    Attributes:
        host_s: The host's wall clock.
        event: The point in the device's CUDA stream; `None` where the host does the work itself.
        worked_s: Processor time of this process up to then; `None` where waiting counts too.
    """

    host_s: float
    event: torch.cuda.Event | None = None
    worked_s: float | None = None


class Clock:
    """Timer that marks points in a device's work and measures between them.

    On CUDA a mark is an event in that device's stream, current or not: nothing is synchronised
    until `seconds` is asked for. On the CPU it is the wall clock, but no more than the processor
    time this process used: slices of time that other programs took are not the model's, unless
    cores are ``shared`` on purpose. (Several threads use more processor time than the wall clock
    shows, so theirs is the wall clock alone.)
    """

    def __init__(self, device: torch.device, *, shared: bool = False) -> None:
        self.cuda, self._device, self._shared = device.type in ON_CUDA, device, shared

    def mark(self) -> Mark:
        """Record a point in time for `seconds`."""
        if not self.cuda:
            worked_s = None if self._shared else time.process_time()
            return Mark(time.perf_counter(), worked_s=worked_s)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return Mark(time.perf_counter(), event)

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the time between two marks, waiting until the device has reached the second."""
        if start.event is None or end.event is None:
            # The smaller of both: processor time leaves out what other programs took, and the
            # wall clock is right where several threads add up more processor time than passed.
            wall_s = end.host_s - start.host_s
            if start.worked_s is None or end.worked_s is None:
                return wall_s
            return min(wall_s, end.worked_s - start.worked_s)
        end.event.synchronize()
        return float(start.event.elapsed_time(end.event)) / 1e3

    def settle(self) -> None:
        """Wait until the device is idle, so that no earlier work runs into the next mark."""
        if self.cuda:
            torch.cuda.synchronize(self._device)

    def head_start(self, seconds: float) -> None:
        """Keep the device busy for a while, so that the host can issue work in advance.

        Without it the time between two events is the host's wherever a kernel takes less time to
        run than to launch.
        """
        if self.cuda and seconds > 0:
            with torch.cuda.device(self._device):
                torch.cuda._sleep(int(seconds * SLEEP_CYCLES_PER_S))


def timing(samples_s: list[float]) -> Timing:
    """Return the median and interquartile range of repeated measurements."""
    ordered = sorted(samples_s)
    if len(ordered) < 2:
        return Timing(median_s=ordered[0] if ordered else 0.0)
    lower, middle, upper = quantiles(ordered, n=4, method="inclusive")
    return Timing(median_s=middle, spread_s=upper - lower, repeats=len(ordered))
