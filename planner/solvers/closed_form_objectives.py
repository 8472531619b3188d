"""Solvers of throughput, latency, memory and devices, which the exact search minimises itself."""

from __future__ import annotations

import math
from dataclasses import replace

from ...core.errors import DeadlineExceeded
from ..cost.assignment import Assignment
from ..cost.plan_cost import CostedPlan, Decision
from ..problem.problem import PlanningRequest, all_parts
from ..search.arcs import Measure, to_assignment
from ..search.branch_and_bound import BranchAndBound, Effort
from .feasibility import find_any_plan, infeasible_error
from .staged_search import MEASURES, PlanPool, bound_simulated_step, search_in_stages
from .step_time import choose_fastest


def solve_measure(request: PlanningRequest, *, measure: Measure) -> Decision:
    """Return the plan of least throughput or latency."""
    pool, bound = search_in_stages(request, measure)
    decision = _decide(request, _choose_first(request, pool), bound)
    return replace(decision, is_whole=pool.is_whole)


def solve_devices(request: PlanningRequest) -> Decision:
    """Return the plan with the fewest devices; among those, the one with the least step."""
    measure, effort = MEASURES[request.options.schedule], Effort(request.deadline)
    fewest, found, is_proven = math.inf, None, request.is_whole
    for part in all_parts(request, request.devices):
        search = BranchAndBound(part.space, measure, effort)
        try:
            paths = search.find_every_count()
        except DeadlineExceeded:
            is_proven = False
            continue
        least = min(paths, key=lambda path: path.num_replicas, default=None)
        if least is not None and least.num_replicas < fewest:
            fewest = least.num_replicas
            found = to_assignment(least.arcs, search.space.tables, search.space.devices)
    if found is None and is_proven:
        raise infeasible_error(request)
    limit = int(fewest) if found else None
    pool, _ = search_in_stages(request, measure, max_total_replicas=limit)
    if found is not None:
        pool.add(found, math.inf)
    bound = float(fewest) if found and is_proven else float(request.options.num_stages or 1)
    return _decide(request, _choose_first(request, pool), bound)


def solve_memory(request: PlanningRequest) -> Decision:
    """Return the plan with the least largest device; among those, the one with the least step.

    Bisection over a common limit, between one that nothing fits and the largest device of a plan.
    """
    try:
        found = find_any_plan(request, request.devices)
    except DeadlineExceeded:
        gave_up = PlanPool(request.cost_model, gave_up=True)
        return _decide(request, choose_fastest(request, gave_up)[0], 0.0)
    if found is None:
        raise infeasible_error(request)
    # Invariant: no plan fits `low`, and `least` fits `high`, its own largest device.
    low, high = -1, _largest_bytes(request, found)
    least = found
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found = find_any_plan(request, request.devices.cap_memory(middle))
        except DeadlineExceeded:
            break
        if found is None:
            low = middle
        else:
            high, least = _largest_bytes(request, found), found
        bound = float(low + 1) if request.is_whole else 0.0
        request.tell(request.cost_model.evaluate(least), bound)
    pool, _ = search_in_stages(request, MEASURES[request.options.schedule], limit_bytes=high)
    costed = request.cost_model.evaluate(pool.best(1)[0] if pool.values else least)
    bound = float(low + 1)
    if not request.is_whole:
        bound = float(request.order_free.state_bytes) if request.order_free else 0.0
    return _decide(request, costed, bound)


def _decide(request: PlanningRequest, costed: CostedPlan, bound: float) -> Decision:
    return Decision(costed, min(bound, costed.value), bound_simulated_step(request, costed))


def _choose_first(request: PlanningRequest, pool: PlanPool) -> CostedPlan:
    """Return the best plan of the search, or a candidate if it was given up without any."""
    return (
        request.cost_model.evaluate(pool.best(1)[0])
        if pool.values
        else choose_fastest(request, pool)[0]
    )


def _largest_bytes(request: PlanningRequest, assignment: Assignment) -> int:
    return max(stage.memory.total_bytes for stage in request.cost_model.stages(assignment))
