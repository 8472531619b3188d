"""Time on a device, read the same way everywhere."""

from __future__ import annotations

import time
from statistics import quantiles

import torch

from ..core.profile import Timing


class Clock:
    """Marks points in a device's work and measures between them.

    On CUDA a mark is an event in the current stream: nothing is synchronised until `seconds`
    is asked for. On the CPU it is the wall clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> torch.cuda.Event | float:
        """A point in time, to be handed to `seconds`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Time between two marks, waiting for the device to have reached the second."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float)
            assert isinstance(end, float)
            return end - start
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait until the device is idle, so that no earlier work runs into the next mark."""
        if self._cuda:
            torch.cuda.synchronize()


def timing(samples_s: list[float]) -> Timing:
    """Median and distance between the quartiles of repeated measurements."""
    ordered = sorted(samples_s)
    if len(ordered) < 2:
        return Timing(median_s=ordered[0] if ordered else 0.0)
    lower, middle, upper = quantiles(ordered, n=4, method="inclusive")
    return Timing(median_s=middle, spread_s=upper - lower, repeats=len(ordered))
