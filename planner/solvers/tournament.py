"""Tournament of candidate plans, won by the least simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

from ...core.errors import InvalidInput
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.assignment import Assignment
from ..cost.plan_cost import CostedPlan, StageCost
from ..problem.problem import PlanningRequest

NEAR = 0.05
"""Relative distance from the fastest plan within which others are worth varying."""

FREE_SIMULATIONS = 8
"""Plans simulated beyond the budget, unless they are large."""

MAX_ACTIONS = 200_000
"""Actions simulated for all others: half a second without compiled code."""

LARGE = 10
"""Multiple of the budget beyond which no second plan is simulated."""


class Tournament:
    """Plans that compete by their simulated step; those with too high a bound are not simulated.

    ``max_actions`` is the budget of simulated actions. The fastest plan of each group is worth
    varying; bounds may be up to ``slack``, relatively, above the fastest plan. ``known_s`` is a
    step known from elsewhere: plans that are slower by their bound are not simulated either.
    """

    def __init__(
        self,
        request: PlanningRequest,
        max_actions: int = MAX_ACTIONS,
        group_of: Callable[[Assignment], Hashable] = lambda entry: entry.num_stages,
        slack: float = 1e-9,
        known_s: float = math.inf,
    ) -> None:
        self.request, self.max_actions = request, max_actions
        self.group_of, self.slack, self.known_s = group_of, slack, known_s
        self.cost_model = request.cost_model
        self.best: CostedPlan | None = None
        self._seen: set[Assignment] = set()
        self._varied: set[Assignment] = set()
        self._leaders: dict[Hashable, CostedPlan] = {}
        self._simulations = self._actions = self._all_actions = 0
        self._is_spent = False

    @property
    def is_over(self) -> bool:
        """Return True if there is a plan, but no time or budget for another one."""
        return self.best is not None and (self._is_spent or self.request.is_over)

    def add(self, assignments: Iterable[Assignment]) -> None:
        """Simulate these and keep the fastest; past the deadline only until there is one."""
        for assignment in assignments:
            if self.best is not None and self.request.is_over:
                return
            if assignment in self._seen:
                continue
            self._seen.add(assignment)
            # In order of cost: constraints, memory, the bound on the step, the simulation.
            if not self.request.allows(assignment):
                continue
            try:
                stages = self.cost_model.stages(assignment)
            except InvalidInput:  # the schedule does not support these numbers
                continue
            if not self.cost_model.fits(stages, assignment) or self._is_hopeless(
                assignment, stages
            ):
                continue
            self._is_spent = self._spend(assignment)
            if self._is_spent and self.best is not None:
                return
            costed = self.cost_model.evaluate_if_feasible(assignment)
            if costed is not None:
                self.add_simulated(costed)

    def add_simulated(self, costed: CostedPlan) -> None:
        """Add a plan whose step is known already."""
        group, rank = self.group_of(costed.assignment), _rank(costed)
        if self.best is None or rank < _rank(self.best):
            self.best = costed
            self.request.tell(costed)
        if group not in self._leaders or rank < _rank(self._leaders[group]):
            self._leaders[group] = costed

    def leaders(self, most: int, near: float = NEAR) -> list[Assignment]:
        """Return the fastest plan of each group, if near the best."""
        leaders = sorted(self._leaders.values(), key=_rank)[:most]
        limit_s = min(leaders[0].step_time_s, self.known_s) * (1 + near) if leaders else 0.0
        return [entry.assignment for entry in leaders if entry.step_time_s <= limit_s]

    def take_leaders(self, most: int, near: float = NEAR) -> list[Assignment]:
        """Return the best leaders that were not taken before, to be varied once."""
        near_ones = self.leaders(len(self._leaders), near)
        found = [entry for entry in near_ones if entry not in self._varied][:most]
        self._varied.update(found)
        return found

    def _spend(self, assignment: Assignment) -> bool:
        """Count the actions of a simulation; return True if they exceed the budget."""
        # Replicas with a common divisor make equal pipelines, of which one is simulated.
        pipelines = math.gcd(*assignment.replicas)
        rounds = -(-self.cost_model.num_microbatches // pipelines)
        works = 3 if self.request.options.schedule in SPLIT_BACKWARD else 2
        actions = works * assignment.num_stages * rounds
        self._simulations += 1
        self._all_actions += actions
        if self._simulations > FREE_SIMULATIONS:
            self._actions += actions
        is_large = self._simulations > 1 and self._all_actions > LARGE * self.max_actions
        return is_large or self._actions > self.max_actions

    def _is_hopeless(self, assignment: Assignment, stages: tuple[StageCost, ...]) -> bool:
        if self.best is None:
            return False
        tied_s = self.cost_model.tied_sync_s(assignment)
        least_s = self.cost_model.least_step_s(assignment, stages, tied_s)
        return least_s > min(self.best.step_time_s, self.known_s) * (1 + self.slack)


def _rank(costed: CostedPlan) -> tuple[float, float, int, int, int, Assignment]:
    largest_bytes = max(stage.held_bytes for stage in costed.stages)
    return (
        costed.step_time_s, costed.value, costed.assignment.num_stages, largest_bytes,
        sum(costed.assignment.extra_depths), costed.assignment,
    )  # fmt: skip
