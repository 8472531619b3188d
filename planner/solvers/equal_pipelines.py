"""Candidates of equal pipelines: plans of groups of devices, each planned as one device.

Where the replicas of all stages share a divisor, a plan falls into that many pipelines that never
wait for each other, and its simulated step is close to the closed form. That leaves out what other
replicas wait for, so the search by it has no reason to report such plans. A few groups of devices
are a cluster so small that the search of steps goes through nearly all plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..cost.assignment import Assignment, place_stages
from ..cost.device_classes import DeviceClass
from ..problem.problem import PlanningRequest
from ..problem.regular import get_rule

MOST_GROUPS = 8
"""Groups that the devices are divided into, at most: as many as the search of steps can prove."""

MOST_ATOMS = 300
"""Positions up to which groups are planned; more take as long as planning single devices."""

LEAST_S = 0.2
"""Time left below which groups are not planned: their search seldom looks at the clock."""

GAP = 1e-2
"""Relative gap at which the search by the closed form ends: it only gives the first plans."""


def list_equal_pipelines(
    request: PlanningRequest, solver: Callable[[PlanningRequest], list[Assignment]]
) -> Iterator[Assignment]:
    """Yield the solver's plans for groups of devices.

    To the solver, summing gradients inside a group costs nothing, and each of its devices holds
    all of what replicas may share: a step is too short, and a plan may have more room than it
    needs. Where groups would not be alike, or rules are for single devices, there are none.
    """
    classes, options = request.devices.classes, request.options
    if len(classes) > 1 or request.cluster.links or get_rule(options) != "no":
        return
    if request.branches is not None or request.costs.num_atoms > MOST_ATOMS:
        return
    if time.monotonic() + LEAST_S > request.deadline:
        return
    size = _group_size(classes[0])
    most = min(options.max_replicas or len(classes[0]), options.num_microbatches)
    if not 1 < size <= most:
        return
    inside = set(classes[0].devices) - set(classes[0].devices[::size])
    changed = {
        "num_microbatches": -(-options.num_microbatches // size),
        "max_replicas": most // size,
        "gap": max(GAP, options.gap),
    }
    try:
        part = replace(
            request,
            cluster=request.cluster.without(*inside),
            options=options.model_copy(update=changed),
            deadline=(time.monotonic() + request.deadline) / 2,
            progress=None,
        )
        found = solver(part)
    except (DeadlineExceeded, Infeasible, InvalidInput):
        return
    for one in found:
        replicas = [count * size for count in one.replicas]
        placed = place_stages(one.cuts, replicas, request.devices, recompute=one.recompute)
        if placed is not None:
            yield replace(placed, extra_depths=one.extra_depths)


def _group_size(entry: DeviceClass) -> int:
    """Return the size of at most `MOST_GROUPS` equal groups that are aligned with links, or 0."""
    for size in range(1, len(entry) + 1):
        is_aligned = all(size % own == 0 or own % size == 0 for own in entry.group_sizes)
        if len(entry) % size == 0 and is_aligned and 1 < len(entry) // size <= MOST_GROUPS:
            return size
    return 0
