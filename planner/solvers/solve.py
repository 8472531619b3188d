"""Registry of solvers: one for each objective, all with one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ...core.errors import DeadlineExceeded, InvalidInput
from ...core.plan.plan import Objective
from ..cost.plan_cost import Decision
from ..problem.problem import PlanningRequest
from .balance_objectives import solve_balance
from .closed_form_objectives import solve_devices, solve_measure, solve_memory
from .robust import solve_robust
from .simulated_search import CandidateSource
from .staged_search import MEASURES
from .step_time import solve_step_time
from .tournament import Tournament
from .whole_groups import solve_with_whole_groups

SOLVERS: dict[Objective, Callable[[PlanningRequest], Decision]] = {
    "step_time": solve_step_time,
    "throughput": partial(solve_measure, measure="throughput"),
    "latency": partial(solve_measure, measure="latency"),
    "memory": solve_memory,
    "devices": solve_devices,
    "balance_time": solve_balance,
    "balance_size": solve_balance,
    "pipedream": solve_balance,
}


def solve(request: PlanningRequest) -> Decision:
    """Return the best plan by the request's objective."""
    options = request.options
    if options.objective not in ("step_time", "latency") and options.schedule not in MEASURES:
        raise InvalidInput(
            f"the objective {options.objective!r} supports the gpipe and 1f1b schedules, not "
            f"{options.schedule!r}",
            field="/options/schedule",
        )
    if request.progress:
        _tell_first(request)
    if options.robust:
        decision = solve_robust(request, solve)
    elif options.objective == "step_time":
        decision = solve_with_whole_groups(request, _solve_step_time)
    else:
        decision = SOLVERS[options.objective](request)
    request.tell(decision.costed, decision.lower_bound)
    return decision


def _tell_first(request: PlanningRequest) -> None:
    """Report the first quick plan that fits, which takes milliseconds."""
    source, tournament = CandidateSource(request), Tournament(request)
    for assignment in source.candidates(source.promising()):
        tournament.add([assignment])
        if tournament.best is not None:
            break


def _solve_step_time(request: PlanningRequest) -> Decision:
    decision = SOLVERS["step_time"](request)
    return _try_relays(request, decision) if request.options.skips == "direct" else decision


def _try_relays(request: PlanningRequest, decision: Decision) -> Decision:
    """Return the decision with the plan of a search limited to relays, if that plan is faster."""
    # Every candidate is simulated both ways, but which candidates there are follows from the
    # fastest one so far, so allowing direct sends alone could make the result slower.
    if request.is_over or not request.cost_model.knows_readers:
        return decision
    options = request.options.model_copy(update={"skips": "relay"})
    try:
        relayed = solve_step_time(replace(request, options=options, progress=None))
    except DeadlineExceeded:
        return decision
    other = request.cost_model.evaluate(relayed.costed.assignment)
    if decision.costed.step_time_s <= other.step_time_s:
        return decision
    return replace(decision, costed=other)
