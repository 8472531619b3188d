"""More freedom never gives a slower plan: the best plans under narrower options compete as well.

Which plans are tried follows from the best one so far, so a search of more plans may miss one that
a search of fewer finds. Where a plan is not proven to be the best, each option is narrowed in turn
and the fastest plan of all is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ...core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..cost.plan_cost import Decision
from ..problem.problem import PlanningRequest
from ..search.branch_and_bound import ROUNDING

MAX_SIZE = 1_500
"""Positions times devices up to which options are narrowed: a search takes below a second then."""

MAX_COUNTS = 8
"""Devices up to which every number of stages is tried."""


def solve_with_restrictions(
    request: PlanningRequest, solver: Callable[[PlanningRequest], Decision]
) -> Decision:
    """Return the solver's decision with the fastest plan under the options or narrower ones."""
    decision = solver(request)
    if request.costs.num_atoms * len(request.cluster.devices) > MAX_SIZE:
        return decision
    for change in list_restrictions(request, decision.costed.assignment.num_stages):
        best_s = decision.costed.step_time_s
        if request.is_over or decision.simulated_bound_s >= best_s * (1 - ROUNDING):
            break
        options = request.options.model_copy(update=change)
        try:
            part = replace(request, options=options, progress=None, seeks_bound=False)
            found = request.cost_model.evaluate_if_feasible(solver(part).costed.assignment)
        except (DeadlineExceeded, Infeasible, InvalidInput):
            continue
        if found is not None and found.step_time_s < best_s:
            decision = replace(decision, costed=found)
            request.tell(found)
    return decision


def list_restrictions(request: PlanningRequest, num_stages: int) -> Iterator[Mapping[str, object]]:
    """Yield changes of the options that allow fewer plans, near a plan of so many stages."""
    options, total = request.options, len(request.cluster.devices)
    if options.skips == "direct" and request.cost_model.knows_readers:
        yield {"skips": "relay"}
    if options.max_replicas != 1:
        yield {"max_replicas": 1}
    if options.recompute == "auto":
        yield from ({"recompute": mode} for mode in ("never", "always"))
    if request.branches is not None:
        yield {"layer_order": "given"}
    if options.max_extra_in_flight:
        yield {"max_extra_in_flight": 0}
    if len(options.strategies) > 1:
        yield from ({"strategies": (each,)} for each in options.strategies)
    if options.num_stages is None:
        near = {num_stages - 1, num_stages + 1, total}
        most = min(total, request.costs.num_atoms, options.max_stages or total)
        counts = range(1, most + 1) if total <= MAX_COUNTS else sorted(near)
        yield from ({"num_stages": count} for count in counts if 0 < count <= most)
