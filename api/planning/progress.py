"""Phases of planning requests, for pages that wait for their plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ...core.plan.plan import Objective
from ...core.plan.table import format_best_so_far
from ..telemetry.tracing import request_id


@dataclass
class SearchProgress:
    """Progress of one search.

    Attributes:
        objective: What it minimises.
        best: Value of the best plan so far and the lower bound, in memory shared with the solver
            process; empty until that has begun, and infinite until it has a plan.
    """

    objective: Objective
    best: Sequence[float] = ()

    def describe(self) -> str:
        """Describe the search and what it has found."""
        if not self.best or self.best[0] == float("inf"):
            return "Searching for the best cuts …"
        return f"Searching: {format_best_so_far(self.objective, *self.best)} …"


class PlanningPhases:
    """Current phase of each planning request, by its project and request id.

    They are known to this process alone; of a request that another server answers there is nothing.
    """

    def __init__(self) -> None:
        self._phases: dict[tuple[str, str | None], str | SearchProgress] = {}

    @contextmanager
    def phase(self, project: str, phase: str | SearchProgress) -> Iterator[None]:
        """Have the current request be in a phase."""
        key = project, request_id()
        self._phases[key] = phase
        try:
            yield
        finally:
            self._phases.pop(key, None)

    def describe(self, project: str, request_id: str) -> str:
        """Return the phase of a request in words; empty if nothing is known of it."""
        phase = self._phases.get((project, request_id), "")
        return phase if isinstance(phase, str) else phase.describe()
