"""Whether anything fits."""

from __future__ import annotations

from ..cost.assignment import Assignment, from_hops
from ..cost.device_classes import Devices
from ..problem.problem import Request, all_parts
from ..search.arcs import Measure
from ..search.branch_and_bound import BoxSearch, Effort


def any_plan(request: Request, devices: Devices) -> Assignment | None:
    """Some plan that fits these devices.

    Raises:
        DeadlineExceeded: The search was given up.
    """
    effort = Effort(request.deadline)
    schedule = request.options.schedule
    measure: Measure = (
        "latency" if request.pricer.only_forward else ("gpipe" if schedule == "gpipe" else "1f1b")
    )
    for part in all_parts(request, devices, with_ties=False):
        search = BoxSearch(part.space, measure, effort)
        path = search.first_plan()
        if path is not None:
            return from_hops(
                path.hops,
                search.space.tables,
                search.moves.config_class.tolist(),
                search.moves.config_recompute.tolist(),
                devices,
            )
    return None
