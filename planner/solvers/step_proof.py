"""Search for the least simulated step among all plans, with a proof as far as it goes."""

from __future__ import annotations

from collections.abc import Iterator

from ..problem.problem import PlanningRequest, all_parts
from ..search.arcs import StageArc, to_assignment
from ..search.step_graph import StepGraph, TooLarge
from ..search.step_search import StepSearch
from .tournament import Tournament

SCHEDULES = ("1f1b", "gpipe", "zero_bubble")
"""Schedules whose step has a bound for the beginning of a plan."""

MAX_PAIRS = 1_500_000
"""Pairs of stages whose intervals are looked at: some 0.2 s."""


BEAM = 24
"""Beginnings of plans of each number of stages that are extended where the proof is too long."""


def is_supported(request: PlanningRequest) -> bool:
    """Return True if every plan is a chain of stages in the profile's order, sends relayed."""
    options = request.options
    return (
        options.objective == "step_time"
        and options.schedule in SCHEDULES
        and options.skips == "relay"
        and request.branches is None
        and request.band is None
        and request.is_whole
    )


def search_steps(request: PlanningRequest, tournament: Tournament) -> float:
    """Add the plans that may be faster than the tournament's best; return a bound on all plans."""
    best = tournament.best
    if best is None or request.is_over or not is_supported(request):
        return 0.0
    table, least_s = request.costs.stages, min(best.step_time_s, tournament.known_s)
    graphs = []
    try:
        for part in all_parts(request, request.devices):
            graphs.append((StepGraph(part.space, least_s - part.tied_s), part.tied_s))
    except TooLarge:
        return 0.0
    search = StepSearch(graphs, least_s)

    def simulate(plans: Iterator[tuple[StageArc, ...]], search: StepSearch) -> None:
        for arcs in plans:
            tournament.add([to_assignment(arcs, table, request.devices)])
            search.limit_s = min((tournament.best or best).step_time_s, least_s)
            if request.is_over:
                return

    simulate(search.plans(MAX_PAIRS), search)
    bound_s = search.bound_s
    if bound_s < search.limit_s and not request.is_over:
        # Too many plans are left to prove anything more; the most promising ones are tried.
        other = StepSearch(graphs, search.limit_s)
        simulate(other.beam(BEAM), other)
    if not request.devices.has_equal_places:  # each plan was simulated in one of its places
        bound_s = min(bound_s, search.least_yielded_s)
    # Deeper warm-up than the schedule's own may be faster; its plans are starts for that.
    return 0.0 if request.options.max_extra_in_flight else bound_s
