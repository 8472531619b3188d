"""Warm-up depths of 1F1B: more micro-batches in flight hide slow links, if memory allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from ...core.errors import InvalidInput
from ...schedules.action_order import default_depths
from ..cost.assignment import Assignment
from ..cost.plan_cost import CostedPlan, CostModel
from ..problem.problem import PlanningRequest
from ..search.branch_and_bound import ROUNDING
from .tournament import Tournament

MAX_STARTS = 2
"""Plans of different numbers of stages whose warm-up is varied."""

NEAR = 0.3
"""Relative distance from the fastest plan that starts may have: hidden links may gain as much."""

STEPS = (-4, -2, -1, 1, 2, 4)
"""Changes of a depth."""

MAX_ROUNDS = 8
"""Rounds in which every stage's depth is changed."""


def extend_warmup(tournament: Tournament, rounds: int = MAX_ROUNDS) -> None:
    """Add the tournament's fastest 1F1B plans with the best extra warm-up that options allow.

    First all stages get as much extra depth as allowed and as memory has room for; then the depth
    of one stage, or of all up to one, is changed while that helps. Last, extra depth that does not
    help is removed.
    """
    for start in tournament.leaders(MAX_STARTS, NEAR):
        # A tournament per start: a second start may gain more than it is behind now.
        own = Tournament(tournament.request)
        own.add([start, *_deepen_all(tournament.cost_model, start)])
        for _ in range(rounds):
            before = own.best
            for stage, change in product(range(start.num_stages - 1), STEPS):
                if own.best is not None and not own.is_over:
                    own.add(
                        _change_depths(tournament.cost_model, own.best.assignment, stage, change)
                    )
            if own.best is before:
                break
        if own.best is not None:
            tournament.add_simulated(_trim(own, own.best))


def _trim(tournament: Tournament, best: CostedPlan) -> CostedPlan:
    """Remove extra depth stage by stage as long as the step stays the same but for rounding."""
    cost_model, limit_s = tournament.cost_model, best.step_time_s * (1 + ROUNDING)
    before: CostedPlan | None = None
    while before is not best:
        before = best
        for stage in range(best.assignment.num_stages):
            extra = _extra(best.assignment)
            held = extra[stage]
            # Ascending, so the least depth that keeps the step is taken.
            for less in sorted({0, held // 2, held - 1} if held else ()):
                if tournament.request.is_over:
                    return best
                wanted = [*extra[:stage], less, *extra[stage + 1 :]]
                found = cost_model.evaluate_if_feasible(_with(cost_model, best.assignment, wanted))
                if found is not None and found.step_time_s <= limit_s:
                    best = found
                    break
    return best


def _extra(assignment: Assignment) -> list[int]:
    return list(assignment.extra_depths or (0,) * assignment.num_stages)


def _deepen_all(cost_model: CostModel, start: Assignment) -> Iterator[Assignment]:
    """Yield all stages with extra depth up to 1, 2, 4 and so on, as far as memory has room."""
    most = cost_model.options.max_extra_in_flight
    extra = 1
    while extra < 2 * most:
        yield _with(cost_model, start, [min(extra, most)] * start.num_stages)
        extra *= 2


def deepen_each(
    request: PlanningRequest, assignments: Iterable[Assignment]
) -> Iterator[Assignment]:
    """Yield plans, each followed by itself with more warm-up where the options allow that."""
    for one in assignments:
        yield one
        if request.options.max_extra_in_flight and request.allows(one):
            with suppress(InvalidInput):  # the schedule does not support these numbers
                yield from _deepen_all(request.cost_model, one)


def _change_depths(
    cost_model: CostModel, start: Assignment, stage: int, change: int
) -> Iterator[Assignment]:
    """Yield one stage's depth changed, and that of all stages up to it."""
    extra = _extra(start)
    for first in dict.fromkeys((stage, 0)):
        changed = [entry + change for entry in extra[first : stage + 1]]
        yield _with(cost_model, start, [*extra[:first], *changed, *extra[stage + 1 :]])


def _with(cost_model: CostModel, start: Assignment, wanted: list[int]) -> Assignment:
    """Return the plan with the wanted extra depths, capped by options, memory and earlier stages.

    The last stage has nothing to wait for, and no stage waits for more micro-batches than those
    in front of it let through (`check_depths`).
    """
    plain = replace(start, extra_depths=())
    m, replicas = cost_model.num_microbatches, start.replicas
    own, allowed = default_depths(m, replicas), cost_model.options.max_extra_in_flight
    extra: list[int] = []
    ahead = m
    for stage, price in enumerate(cost_model.stages(plain)):
        most = min(allowed, wanted[stage], -(-m // replicas[stage]) - own[stage])
        each = price.memory.activations_bytes // own[stage]
        if price.limit_bytes is not None and each:
            most = min(most, (price.limit_bytes - price.memory.total_bytes) // each)
        most = min(most, (ahead - 1) // replicas[stage] + 1 - own[stage])
        extra.append(max(0, most) if stage + 1 < len(replicas) else 0)
        ahead = min(ahead, (own[stage] + extra[-1]) * replicas[stage])
    return replace(start, extra_depths=tuple(extra) if any(extra) else ())
