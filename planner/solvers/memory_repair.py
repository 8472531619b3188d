"""Memory repair: move cuts until every device has room for its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from ..cost.assignment import Assignment
from ..cost.plan_cost import CostModel
from .cut_fitting import RecomputeChoices

STEPS = (-8, -4, -2, -1, 1, 2, 4, 8)
"""Distances that a cut is moved by, in positions."""

MAX_TRIED = 6_000
"""Moves tried in one search: 0.1 s."""

MAX_ALL = 600
"""Combinations of cuts up to which all are tried."""

SHARPNESS = 8
"""Power of fullness in the sum to minimise: the fullest device dominates, others count a little."""

FULLEST = 1e9
"""Cap on fullness, so that its power stays finite."""


def repair_memory(
    cost_model: CostModel,
    assignment: Assignment,
    choices: RecomputeChoices = (False,),
    allows: Callable[[Assignment], bool] | None = None,
) -> Iterator[Assignment]:
    """Yield the assignment with cuts moved so that it fits; nothing if the search fails.

    With few combinations of cuts, all are tried. Otherwise steepest descent of the sum of (needed /
    limit) ** `SHARPNESS` over devices, which may end in a local minimum: an empty result proves
    nothing. Of two ``choices`` of recomputation a stage gets the one that needs less memory;
    ``allows`` says which cuts keep the pins.
    """
    search = _RepairSearch(cost_model, assignment, choices)
    inner = range(1, cost_model.costs.num_atoms)
    if math.comb(len(inner), assignment.num_stages - 1) <= MAX_ALL:
        for chosen in combinations(inner, assignment.num_stages - 1):
            search.cut_at((0, *chosen, cost_model.costs.num_atoms))
            if search.fits() and (allows is None or allows(search.build())):
                yield search.build()
        return
    tried, best = 0, search.fullness(search.held)
    while tried < MAX_TRIED:
        if search.fits():
            yield search.build()
            return
        found: tuple[int, int] | None = None
        for place, position in search.moves():
            tried += 1
            fullness = search.fullness(search.held_after(place, position))
            # Fullness is cheap; pins are only asked about moves that help.
            if fullness < best and (allows is None or allows(search.build(place, position))):
                found, best = (place, position), fullness
        if found is None:
            return
        search.move(*found)


class _RepairSearch:
    """Cuts as indices of positions, with the memory that every device needs for them."""

    def __init__(
        self, cost_model: CostModel, assignment: Assignment, choices: RecomputeChoices
    ) -> None:
        self.assignment, self.choices = assignment, choices
        self.memory_tables = cost_model.memory_tables
        self.positions = cost_model.costs.positions
        self.depths = cost_model.depths(assignment)
        devices, classes = cost_model.devices, assignment.classes
        owners = [
            assignment.device_indices(devices, stage)[0] for stage in range(assignment.num_stages)
        ]
        number = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
        self.owner = [number[owner] for owner in owners]
        self.limits: list[int | None] = [None] * len(number)
        for owner, entry in zip(self.owner, classes, strict=True):
            self.limits[owner] = devices.classes[entry].limit_bytes
        self.cut_at([cost_model.costs.index[cut] for cut in assignment.cuts])

    def cut_at(self, cuts: Sequence[int]) -> None:
        self.cuts = list(cuts)
        self.needed = [self._bytes(stage, *span) for stage, span in enumerate(pairwise(cuts))]
        self.held = [0] * len(self.limits)
        for owner, needed in zip(self.owner, self.needed, strict=True):
            self.held[owner] += needed

    def build(self, place: int = 0, position: int = 0) -> Assignment:
        """Return the assignment with these cuts, one of them moved."""
        cuts = list(self.cuts)
        cuts[place] = position
        recompute = tuple(
            min(self._by_choice(stage, *span))[1] for stage, span in enumerate(pairwise(cuts))
        )
        cuts = [self.positions[index] for index in cuts]
        return replace(self.assignment, cuts=tuple(cuts), recompute=recompute)

    def _bytes(self, stage: int, first: int, last: int) -> int:
        return min(self._by_choice(stage, first, last))[0]

    def _by_choice(self, stage: int, first: int, last: int) -> list[tuple[int, bool]]:
        depth, replicas = self.depths[stage], self.assignment.replicas[stage]
        return [
            (int(self.memory_tables.row(first, again, depth, replicas)[last]), again)
            for again in self.choices
        ]

    def fits(self) -> bool:
        return all(
            limit is None or held <= limit
            for held, limit in zip(self.held, self.limits, strict=True)
        )

    def fullness(self, held: list[int]) -> float:
        return sum(
            float(min(needed / max(limit, 1), FULLEST)) ** SHARPNESS
            for needed, limit in zip(held, self.limits, strict=True)
            if limit is not None
        )

    def moves(self) -> Iterator[tuple[int, int]]:
        """Yield moves as cut and new position, for cuts of stages on devices that lack room."""
        ratios = [
            0.0 if limit is None else held / max(limit, 1)
            for held, limit in zip(self.held, self.limits, strict=True)
        ]
        owners = {owner for owner, ratio in enumerate(ratios) if ratio > 1}
        for place in range(1, len(self.cuts) - 1):
            if self.owner[place - 1] in owners or self.owner[place] in owners:
                for step in STEPS:
                    position = self.cuts[place] + step
                    if self.cuts[place - 1] < position < self.cuts[place + 1]:
                        yield place, position

    def held_after(self, place: int, position: int) -> list[int]:
        """Return the memory of devices with one cut moved."""
        held = list(self.held)
        for stage, needed in self._around(place, position):
            held[self.owner[stage]] += needed - self.needed[stage]
        return held

    def _around(self, place: int, position: int) -> list[tuple[int, int]]:
        """Return the two stages on either side of a cut, with their memory once it is moved."""
        return [
            (place - 1, self._bytes(place - 1, self.cuts[place - 1], position)),
            (place, self._bytes(place, position, self.cuts[place + 1])),
        ]

    def move(self, place: int, position: int) -> None:
        for stage, needed in self._around(place, position):
            self.held[self.owner[stage]] += needed - self.needed[stage]
            self.needed[stage] = needed
        self.cuts[place] = position
