"""Plans compete by their simulated step."""

from __future__ import annotations

from collections.abc import Iterable

from .assignment import Assignment
from .price import Priced, StagePrice
from .request import Request


class Race:
    """Plans compete by their simulated step; those whose bound is too high are not played."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pricer = request.pricer
        self.best: Priced | None = None
        self._seen: set[Assignment] = set()

    def enter(self, assignments: Iterable[Assignment]) -> None:
        """Simulate these and keep the fastest."""
        for assignment in assignments:
            if assignment in self._seen:
                continue
            self._seen.add(assignment)
            if not self.request.allows(assignment):
                continue
            stages = self.pricer.stages(assignment)
            if not self.pricer.fits(stages, assignment) or self._is_hopeless(assignment, stages):
                continue
            priced = self.pricer.priced_if_usable(assignment)
            if priced and (self.best is None or _rank(priced) < _rank(self.best)):
                self.best = priced

    def _is_hopeless(self, assignment: Assignment, stages: tuple[StagePrice, ...]) -> bool:
        if self.best is None:
            return False
        tied_s = self.pricer.tied_sync_s(assignment)
        least_s = self.pricer.least_step_s(stages, tied_s)
        return least_s > self.best.step_time_s * (1 + 1e-9)


def _rank(priced: Priced) -> tuple[float, float, int, Assignment]:
    return (
        priced.step_time_s, priced.value, priced.assignment.num_stages, priced.assignment,
    )  # fmt: skip
