"""Plans compete by their simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

from ...core.errors import InvalidInput
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.assignment import Assignment
from ..cost.plan_cost import Priced, StagePrice
from ..problem.problem import PlanningRequest

NEAR = 0.05
"""How far above the fastest plan, relatively, others are still worth changing."""

FREE_PLAYS = 8
"""Plans that are played on top, unless they are large."""

MAX_ACTIONS = 200_000
"""Actions played over all others: half a second without compiled code."""

LARGE = 10
"""So many times over, no second plan is played."""


class Race:
    """Plans compete by their simulated step; those whose bound is too high are not played.

    Args:
        request: What is asked for.
        max_actions: How much may be played.
        alike: Of plans for which this is the same, the fastest is worth changing.
        slack: Plans are played whose bound is so far, relatively, above the fastest.
    """

    def __init__(
        self,
        request: PlanningRequest,
        max_actions: int = MAX_ACTIONS,
        alike: Callable[[Assignment], Hashable] = lambda entry: entry.num_stages,
        slack: float = 1e-9,
    ) -> None:
        self.request, self.max_actions = request, max_actions
        self.alike, self.slack = alike, slack
        self.pricer = request.pricer
        self.best: Priced | None = None
        self._seen: set[Assignment] = set()
        self._explored: set[Assignment] = set()
        self._leaders: dict[Hashable, Priced] = {}
        self._plays = self._actions = self._all_actions = 0
        self._is_spent = False

    @property
    def is_over(self) -> bool:
        """Whether there is a plan, and no time for another one."""
        return self.best is not None and (self._is_spent or self.request.is_over)

    def enter(self, assignments: Iterable[Assignment]) -> None:
        """Simulate these and keep the fastest; past the deadline only until one is found."""
        for assignment in assignments:
            if self.best is not None and self.request.is_over:
                return
            if assignment in self._seen:
                continue
            self._seen.add(assignment)
            if not self.request.allows(assignment):
                continue
            try:
                stages = self.pricer.stages(assignment)
            except InvalidInput:  # numbers that the schedule does not take
                continue
            if not self.pricer.fits(stages, assignment) or self._is_hopeless(assignment, stages):
                continue
            self._is_spent = self._spends(assignment)
            if self._is_spent and self.best is not None:
                return
            priced = self.pricer.priced_if_usable(assignment)
            if priced is None:
                continue
            self.offer(priced)

    def offer(self, priced: Priced) -> None:
        """Take a plan that was priced elsewhere."""
        key = self.alike(priced.assignment)
        if self.best is None or _rank(priced) < _rank(self.best):
            self.best = priced
        if key not in self._leaders or _rank(priced) < _rank(self._leaders[key]):
            self._leaders[key] = priced

    def leaders(self, most: int, near: float = NEAR) -> list[Assignment]:
        """The fastest plan of each number of stages near the best one."""
        leaders = sorted(self._leaders.values(), key=_rank)[:most]
        limit_s = leaders[0].step_time_s * (1 + near) if leaders else 0.0
        return [entry.assignment for entry in leaders if entry.step_time_s <= limit_s]

    def unexplored(self, most: int, near: float = NEAR) -> list[Assignment]:
        """The fastest plan of each number of stages near the best one; each only once."""
        found = [entry for entry in self.leaders(most, near) if entry not in self._explored]
        self._explored.update(found)
        return found

    def _spends(self, assignment: Assignment) -> bool:
        """Whether playing this one too is more than the race may cost."""
        pipelines = math.gcd(*assignment.replicas)
        rounds = -(-self.pricer.num_microbatches // pipelines)
        works = 3 if self.request.options.schedule in SPLIT_BACKWARD else 2
        actions = works * assignment.num_stages * rounds
        self._plays += 1
        self._all_actions += actions
        if self._plays > FREE_PLAYS:
            self._actions += actions
        is_large = self._plays > 1 and self._all_actions > LARGE * self.max_actions
        return is_large or self._actions > self.max_actions

    def _is_hopeless(self, assignment: Assignment, stages: tuple[StagePrice, ...]) -> bool:
        if self.best is None:
            return False
        tied_s = self.pricer.tied_sync_s(assignment)
        least_s = self.pricer.least_step_s(assignment, stages, tied_s)
        return least_s > self.best.step_time_s * (1 + self.slack)


def _rank(priced: Priced) -> tuple[float, float, int, int, Assignment]:
    return (
        priced.step_time_s, priced.value, priced.assignment.num_stages,
        sum(priced.assignment.extra_depths), priced.assignment,
    )  # fmt: skip
