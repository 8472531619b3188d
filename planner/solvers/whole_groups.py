"""Plans of a cluster without its incomplete groups, which compete with plans of all of it.

A node that lost a device makes a cluster irregular. The search of the whole cluster contains every
plan that leaves such nodes out, but finds the best by its closed form, and simulates only some: so
the cluster without them is planned as well, and the plan of all is never the slower one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..cost.assignment import Assignment
from ..cost.device_classes import Devices, list_incomplete
from ..cost.plan_cost import CostedPlan, Decision
from ..problem.problem import PlanningRequest

Solver = Callable[[PlanningRequest], Decision]


def solve_with_whole_groups(request: PlanningRequest, solver: Solver) -> Decision:
    """Return the solver's decision, or its plan for the complete groups alone if that is faster."""
    decision = solver(request)
    known = None if request.is_over else _plan_complete(request, solver)
    if known is None or decision.costed.step_time_s <= known.step_time_s:
        return decision
    return replace(decision, costed=known)


def _plan_complete(request: PlanningRequest, solver: Solver) -> CostedPlan | None:
    """Return the plan for the complete groups, if there are others and it fits."""
    incomplete = list_incomplete(request.cluster)
    if not incomplete or len(incomplete) == len(request.cluster.devices):
        return None
    cluster = request.cluster.without(*incomplete)
    try:
        part = replace(request, cluster=cluster, progress=None, seeks_bound=False)
        found = solver(part).costed.assignment
    except (DeadlineExceeded, Infeasible, InvalidInput):  # such as a pin to a kind that is gone
        return None
    moved = transfer(found, part.devices, request.devices)
    if moved is None or not request.allows(moved):
        return None
    return request.cost_model.evaluate_if_feasible(moved)


def transfer(assignment: Assignment, source: Devices, target: Devices) -> Assignment | None:
    """Return the assignment with its devices, by name, counted in other classes.

    Returns `None` if they do not follow each other there.
    """
    index = {device.name: number for number, device in enumerate(target.cluster.devices)}
    ranks = {
        device: (number, rank)
        for number, entry in enumerate(target.classes)
        for rank, device in enumerate(entry.devices)
    }
    expected = [
        tuple(
            index[source.cluster.devices[device].name]
            for device in assignment.device_indices(source, stage)
        )
        for stage in range(assignment.num_stages)
    ]
    lasts = [ranks[devices[-1]] for devices in expected]
    moved = replace(
        assignment,
        classes=tuple(number for number, _ in lasts),
        ends=tuple(rank + 1 for _, rank in lasts),
    )
    found = [moved.device_indices(target, stage) for stage in range(moved.num_stages)]
    return moved if found == expected else None
