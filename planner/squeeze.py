"""Cuts moved until every device has room for all its stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .assignment import Assignment
from .price import Pricer

STEPS = (-8, -4, -2, -1, 1, 2, 4, 8)
"""How far a cut is moved, in positions."""

MAX_STAGES_PRICED = 60_000
"""Of one search: half a second."""

SHARPNESS = 8
"""The power to which fullness is raised: mostly the fullest device counts, others a little."""


def squeezed(pricer: Pricer, assignment: Assignment) -> Assignment | None:
    """The assignment with its cuts moved so that it fits; `None` if that does not come out.

    Steepest descent of the sum of (needed / limit) ** `SHARPNESS` over all stages' devices. It
    may end where no single move helps, so `None` proves nothing.
    """
    priced, best = 0, _fullness(pricer, assignment)
    while priced < MAX_STAGES_PRICED:
        if pricer.fits(pricer.stages(assignment), assignment):
            return assignment
        found = assignment
        for other in _moved(pricer, assignment):
            fullness = _fullness(pricer, other)
            priced += other.num_stages
            if fullness < best:
                found, best = other, fullness
        if found is assignment:
            return None
        assignment = found
    return None


def _fullness(pricer: Pricer, assignment: Assignment) -> float:
    stages = pricer.stages(assignment)
    return sum(
        float(min(held / max(stage.limit_bytes, 1), 1e9)) ** SHARPNESS
        for stage, held in zip(stages, pricer.held_bytes(stages, assignment), strict=True)
        if stage.limit_bytes is not None
    )


def _moved(pricer: Pricer, assignment: Assignment) -> Iterator[Assignment]:
    """The same with one cut elsewhere."""
    costs, cuts = pricer.costs, assignment.cuts
    for place in range(1, len(cuts) - 1):
        low, here, high = (costs.index[cut] for cut in cuts[place - 1 : place + 2])
        for step in STEPS:
            if low < here + step < high:
                moved = (*cuts[:place], costs.positions[here + step], *cuts[place + 1 :])
                yield replace(assignment, cuts=moved)
