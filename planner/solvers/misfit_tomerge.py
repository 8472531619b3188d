"""The plan that misses the devices' memory by least."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ...core.errors import DeadlineExceeded
from ..cost.assignment import Assignment
from ..cost.device_classes import Devices
from ..problem.problem import Request
from .least_memory_tomerge import any_plan

LEAST_S = 2.0
"""Time there is to find the numbers of an error, whatever the deadline was."""


@dataclass(frozen=True)
class Misfit:
    """A plan that would fit if every device allowed ``needed - limit`` bytes more, and no less.

    Attributes:
        stage: Its stage that lacks most.
        needed_bytes: On each of that stage's devices; where all devices are equal, no plan needs
            less on its largest one.
        limit_bytes: What such a device allows.
    """

    assignment: Assignment
    stage: int
    needed_bytes: int
    limit_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.needed_bytes - self.limit_bytes


def closest_misfit(request: Request) -> Misfit | None:
    """Of all plans the one that lacks least; `None` if none would fit any limits, or one fits.

    Bisection over bytes added to every limit, between too few and what a plan found lacks.
    """
    request = replace(request, deadline=max(request.deadline, time.monotonic() + LEAST_S))
    best = _misfit(request, any_plan(request, without_limits(request.devices)))
    low = 0
    while best is not None and best.excess_bytes - low > 1:
        middle = (low + best.excess_bytes) // 2
        try:
            found = any_plan(request, _with_limits(request.devices, middle))
        except DeadlineExceeded:
            break
        if found is None:
            low = middle
        else:
            best = _misfit(request, found)
    return best


def without_limits(devices: Devices) -> Devices:
    """The same with all the memory one could want."""
    return _with_limits(devices, None)


def _with_limits(devices: Devices, added_bytes: int | None) -> Devices:
    """The same with so much more on every device that has a limit; `None` for no limits."""
    classes = tuple(
        replace(
            entry,
            limit_bytes=None
            if entry.limit_bytes is None or added_bytes is None
            else entry.limit_bytes + added_bytes,
        )
        for entry in devices.classes
    )
    return Devices(devices.cluster, classes)


def _misfit(request: Request, assignment: Assignment | None) -> Misfit | None:
    if assignment is None:
        return None
    misfits = [
        Misfit(assignment, number, stage.memory.total_bytes, stage.limit_bytes)
        for number, stage in enumerate(request.pricer.stages(assignment))
        if stage.limit_bytes is not None and stage.memory.total_bytes > stage.limit_bytes
    ]
    return max(misfits, key=lambda misfit: misfit.excess_bytes, default=None)
