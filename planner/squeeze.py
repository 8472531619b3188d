"""Cuts moved until every device has room for all its stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from .assignment import Assignment
from .price import Pricer
from .room import Room

STEPS = (-8, -4, -2, -1, 1, 2, 4, 8)
"""How far a cut is moved, in positions."""

MAX_TRIED = 6_000
"""Cuts tried in one search: 0.1 s."""

SHARPNESS = 8
"""The power to which fullness is raised: mostly the fullest device counts, others a little."""

FULLEST = 1e9
"""More often than this no limit is exceeded, so that powers stay finite."""


def squeezed(pricer: Pricer, assignment: Assignment) -> Assignment | None:
    """The assignment with its cuts moved so that it fits; `None` if that does not come out.

    Steepest descent of the sum of (needed / limit) ** `SHARPNESS` over devices. It may end where
    no single move helps, so `None` proves nothing.
    """
    search = _Search(pricer, assignment)
    tried, best = 0, search.fullness(search.held)
    while tried < MAX_TRIED:
        if search.fits():
            cuts = tuple(pricer.costs.positions[index] for index in search.cuts)
            return replace(assignment, cuts=cuts)
        found: tuple[int, int] | None = None
        for place, position in search.moves():
            tried += 1
            fullness = search.fullness(search.held_after(place, position))
            if fullness < best:
                found, best = (place, position), fullness
        if found is None:
            return None
        search.move(*found)
    return None


class _Search:
    """Cuts as indices of positions, and what every device needs with them.

    Attributes:
        held: Bytes, by the place of the device's first stage along the pipeline.
    """

    def __init__(self, pricer: Pricer, assignment: Assignment) -> None:
        self.assignment, self.room = assignment, Room(pricer)
        self.cuts = [pricer.costs.index[cut] for cut in assignment.cuts]
        self.depths = pricer.depths(assignment)
        devices, classes = pricer.devices, assignment.classes
        owners = [
            assignment.device_indices(devices, stage)[0] for stage in range(assignment.num_stages)
        ]
        number = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
        self.owner = [number[owner] for owner in owners]
        self.limits: list[int | None] = [None] * len(number)
        for owner, entry in zip(self.owner, classes, strict=True):
            self.limits[owner] = devices.classes[entry].limit_bytes
        self.needed = [self._bytes(stage, *span) for stage, span in enumerate(pairwise(self.cuts))]
        self.held = [0] * len(number)
        for owner, needed in zip(self.owner, self.needed, strict=True):
            self.held[owner] += needed

    def _bytes(self, stage: int, first: int, last: int) -> int:
        one = self.assignment
        row = self.room.row(first, one.recompute[stage], self.depths[stage], one.replicas[stage])
        return int(row[last])

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
        """Which cut, and where to: those of all stages on devices that lack room."""
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
        """What devices need with one cut moved."""
        held = list(self.held)
        for stage, needed in self._around(place, position):
            held[self.owner[stage]] += needed - self.needed[stage]
        return held

    def _around(self, place: int, position: int) -> list[tuple[int, int]]:
        """The two stages a cut is between, with what they need once it is moved."""
        return [
            (place - 1, self._bytes(place - 1, self.cuts[place - 1], position)),
            (place, self._bytes(place, position, self.cuts[place + 1])),
        ]

    def move(self, place: int, position: int) -> None:
        for stage, needed in self._around(place, position):
            self.held[self.owner[stage]] += needed - self.needed[stage]
            self.needed[stage] = needed
        self.cuts[place] = position
