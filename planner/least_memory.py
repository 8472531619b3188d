"""The least memory that any plan needs on its largest device."""

from __future__ import annotations

from dataclasses import replace

from .assignment import Assignment, from_hops
from .classes import Devices
from .moves import Measure
from .request import Request, all_parts
from .search import BoxSearch, Effort


def least_memory_bytes(request: Request) -> int | None:
    """Bytes that suffice on every device, whatever they have now; `None` if no plan exists.

    Bisection between a limit nothing fits and the largest device of a plan that was found.
    """
    free = Devices(
        request.cluster,
        tuple(replace(entry, limit_bytes=None) for entry in request.devices.classes),
    )
    found = any_plan(request, free)
    if found is None:
        return None
    low, high = -1, _largest(request, found)
    while high - low > 1:
        middle = (low + high) // 2
        found = any_plan(request, free.limited(middle))
        if found is None:
            low = middle
        else:
            high = _largest(request, found)
    return high


def any_plan(request: Request, devices: Devices) -> Assignment | None:
    """Some plan that fits these devices."""
    effort = Effort()
    schedule = request.options.schedule
    measure: Measure = (
        "latency" if request.pricer.only_forward else ("gpipe" if schedule == "gpipe" else "1f1b")
    )
    for part in all_parts(request, devices, with_ties=False):
        search = BoxSearch(part.space, measure, effort)
        path = search.fewest_devices()
        if path is not None:
            return from_hops(
                path.hops,
                search.space.tables,
                search.moves.config_class.tolist(),
                search.moves.config_recompute.tolist(),
                devices,
            )
    return None


def _largest(request: Request, assignment: Assignment) -> int:
    return max(stage.memory.total_bytes for stage in request.pricer.stages(assignment))
