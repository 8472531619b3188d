"""Registry of solvers: one for each objective, all with one signature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...core.errors import InvalidInput
from ...core.plan.plan import Objective
from ..cost.plan_cost import Decision
from ..problem.problem import PlanningRequest
from .balance_objectives import solve_balance
from .closed_form_objectives import solve_devices, solve_measure, solve_memory
from .restrictions import solve_with_restrictions
from .robust import solve_robust
from .simulated_search import CandidateSource
from .staged_search import MEASURES
from .step_time import solve_step_time
from .tournament import Tournament

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
        decision = solve_with_restrictions(request, solve_step_time)
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
