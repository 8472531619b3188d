"""Solver of the objective ``step_time``: search by a closed form, choose by simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ...core.errors import DeadlineExceeded
from ..cost.assignment import Assignment
from ..cost.plan_cost import CostedPlan, Decision
from ..heuristics.candidates import (
    take_faster_baseline,
    uniform_grids,
)
from ..problem.problem import PlanningRequest
from ..search.branch_and_bound import GAVE_UP
from .all_plans import list_all_plans
from .equal_pipelines import MOST_GROUPS, list_equal_pipelines
from .feasibility import infeasible_error
from .simulated_search import add_scheduled_plans, search_by_simulation
from .stage_moves import flip_recompute, move_cuts, move_devices
from .staged_search import MEASURES, PlanPool, bound_simulated_step, bound_work_s, search_in_stages
from .step_proof import search_steps
from .tournament import MAX_ACTIONS, Tournament
from .warmup_depth import deepen_each, extend_warmup

MAX_SIMULATED = 40
"""Plans of the search that compete in the simulator."""

MAX_ROUNDS = 12
"""Rounds in which the fastest plans are varied."""

MAX_STARTS = 3
"""Plans varied in each round, of different numbers of stages."""

MAX_LEADERS = 8
"""Plans of groups of devices that go on to compete, each of another number of stages."""

NEAR, NEAR_LATER = 0.05, 0.02
"""Relative distance from the fastest plan within which others are varied, at first and later."""

FIRST_ROUNDS = 2
"""Rounds that vary plans which are farther behind."""


def solve_step_time(request: PlanningRequest) -> Decision:
    """Return the plan of least simulated step.

    Schedules with a closed form are searched exactly by it, and the best plans simulated; for the
    others candidates are only simulated.
    """
    if request.options.schedule not in MEASURES:
        costed, bound_s = search_by_simulation(request)
        return Decision(_take_baseline(request, costed), bound_s, bound_s)
    pool, bound = search_in_stages(request, MEASURES[request.options.schedule])
    costed, step_bound_s = choose_fastest(request, pool)
    bound = min(max(bound, bound_work_s(request)), costed.value)
    best = min((costed.value, *pool.values.values()))
    if step_bound_s < costed.step_time_s and request.seeks_bound:
        step_bound_s = max(step_bound_s, bound_simulated_step(request, costed))
    return Decision(costed, step_bound_s, step_bound_s, best, bound, is_whole=pool.is_whole)


def choose_fastest(request: PlanningRequest, pool: PlanPool) -> tuple[CostedPlan, float]:
    """Return the plan with the least simulated step among the pool's best, grids and variations.

    Ties are broken by objective, then fewer stages, then earlier cuts. Returned with a lower bound
    on the step of all plans, 0 where none is known.
    """
    tournament, bound_s = _compete(request, pool)
    if tournament.best is None:
        raise DeadlineExceeded(GAVE_UP) if pool.gave_up else infeasible_error(request)
    return _take_baseline(request, tournament.best), bound_s


def _list_leaders(request: PlanningRequest, known_s: float) -> list[Assignment]:
    """Return the fastest plans of different numbers of stages, near or below a known step."""
    pool, _ = search_in_stages(request, MEASURES[request.options.schedule])
    return _compete(request, pool, known_s)[0].leaders(MAX_LEADERS)


def _compete(
    request: PlanningRequest, pool: PlanPool, known_s: float = math.inf
) -> tuple[Tournament, float]:
    """Return the tournament of all candidates, and a bound on the step of all plans."""
    cost_model = request.cost_model
    tournament = Tournament(request, known_s=known_s)
    tournament.add(pool.best(MAX_SIMULATED))
    tournament.add(uniform_grids(cost_model))
    if pool.gave_up:
        add_scheduled_plans(request, tournament)
    may_extend = request.options.schedule == "1f1b" and request.options.max_extra_in_flight > 0
    if may_extend:
        # Coarsely first: which plans are varied below depends on their step.
        extend_warmup(tournament, rounds=0)
        most = min(len(request.cluster.devices), request.costs.num_atoms)
        every = list_all_plans(request, [(count, 1) for count in range(1, most + 1)], 1)
        own = Tournament(request, group_of=lambda entry: (entry.classes, entry.recompute))
        own.add(deepen_each(request, every or ()))
        tournament.add(own.leaders(MAX_SIMULATED))
    bound_s = search_steps(request, tournament)
    _vary_leaders(request, tournament, bound_s)
    best = tournament.best
    if best and bound_s < best.step_time_s and len(request.cluster.devices) > MOST_GROUPS:
        # Last, and with a budget of their own: an early good plan ends variations of others.
        tournament.max_actions += MAX_ACTIONS
        solver = partial(_list_leaders, known_s=best.step_time_s)
        tournament.add(list_equal_pipelines(request, solver))
        _vary_leaders(request, tournament, bound_s)
    if may_extend:
        extend_warmup(tournament)
    return tournament, bound_s


def _vary_leaders(request: PlanningRequest, tournament: Tournament, bound_s: float) -> None:
    """Vary the fastest plans, round by round, until none is left or one meets the bound."""
    for number in range(MAX_ROUNDS):
        if tournament.best is not None and bound_s >= tournament.best.step_time_s:
            return
        near = NEAR if number < FIRST_ROUNDS else NEAR_LATER
        starts = tournament.take_leaders(MAX_STARTS, near)
        if not starts or starts[0].num_stages * request.options.num_microbatches > 2**17:
            return
        for start in starts:
            tournament.add(deepen_each(request, _vary(request, start)))


def _take_baseline(request: PlanningRequest, costed: CostedPlan) -> CostedPlan:
    """Return the plan, or a faster baseline of it in the plan's own order of the layers."""
    order = costed.assignment.order
    if not order:
        return take_faster_baseline(request, costed)
    view = request.reorder_profile(order)
    own = view.cost_model.evaluate(replace(costed.assignment, order=()))
    best = take_faster_baseline(view, own)
    return (
        costed
        if best is own
        else request.cost_model.evaluate(replace(best.assignment, order=order))
    )


def _vary(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """Yield variations: one cut moved, or other devices or stages, in the plan's layer order."""
    order = assignment.order
    if not order:  # a tournament checks the constraints
        yield from _move(request, assignment)
        return
    # Of plans in another order it checks few: the view has them all.
    view = request.reorder_profile(order)
    for other in filter(view.allows, _move(view, replace(assignment, order=()))):
        yield replace(other, order=order)


def _move(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    if request.options.max_extra_in_flight and request.options.recompute == "auto":
        # What a stage recomputes decides how many micro-batches fit.
        yield from flip_recompute(assignment)
    if request.costs.has(assignment.cuts):
        yield from move_cuts(assignment, request.costs)
        yield from move_devices(assignment, request.cost_model)
