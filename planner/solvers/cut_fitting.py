"""Cuts by speed and memory for stages whose devices are given, and cuts moved until they fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from ..cost.assignment import Assignment, Cuts
from ..cost.chain import Mask, Positions
from ..cost.plan_cost import CostModel

RecomputeChoices = tuple[bool, ...]
"""Allowed values of a stage's recomputation."""

RECOMPUTE_CHOICES: dict[str, list[RecomputeChoices]] = {
    "never": [(False,)], "always": [(True,)], "auto": [(False,), (True,), (False, True)],
}  # fmt: skip
"""Those to try by the option; the last needs least memory."""

MAX_EXACT = 200
"""Positions up to which earlier stages leave later ones the layers that their memory needs."""

PROBES = 20
"""Bisections of the slowest stage's time, to a millionth."""

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


def fit_cuts(
    cost_model: CostModel,
    assignment: Assignment,
    choices: RecomputeChoices = (False,),
    *,
    limited: bool = True,
) -> Assignment | None:
    """Return the assignment with the cuts of the fastest slowest stage; `None` if there are none.

    Bisection on the time. Each probe gives every stage, from the front, as many layers as time,
    memory and pins allow, and leaves later stages what pins and memory need. The result is exact if
    more layers never need less memory. Stages that share a device divide its memory in the ratio of
    the assignment's own cuts. O(S N) rows of N. Of two ``choices`` of recomputation a stage gets
    the one that lets it take more layers; memory limits are ignored unless ``limited``.
    """
    search = _CutSearch(cost_model, assignment, choices, limited=limited)
    best = search.probe(math.inf)
    if best is None:
        return None
    low_s, high_s = 0.0, search.slowest_s(*best)
    # Invariant: the best cuts take high_s, and none were found within low_s.
    for _ in range(PROBES):
        middle_s = (low_s + high_s) / 2
        found = search.probe(middle_s)
        if found is None:
            low_s = middle_s
        else:
            best, high_s = found, search.slowest_s(*found)
    cuts, recompute = best
    positions = cost_model.costs.positions
    return replace(assignment, cuts=tuple(positions[index] for index in cuts), recompute=recompute)


class _CutSearch:
    """Reach of each stage by time, memory and pins; positions are indices of the tables."""

    def __init__(
        self,
        cost_model: CostModel,
        assignment: Assignment,
        choices: RecomputeChoices,
        *,
        limited: bool,
    ) -> None:
        self.costs, self.cost_model, self.assignment = cost_model.costs, cost_model, assignment
        self.depths = cost_model.depths(assignment)
        self.choices = choices
        self.work_s = {False: cost_model.costs.forward_s + cost_model.costs.backward_s}
        self.work_s[True] = self.work_s[False] + cost_model.costs.recompute_s
        self.memory_tables = cost_model.memory_tables
        classes = cost_model.devices.classes
        self.speeds = [classes[number].speed for number in assignment.classes]
        self.limits = self._limits() if limited else [None] * len(self.speeds)
        self.ends = [self._ends(stage) for stage in range(len(self.speeds))]
        self.finishes = self._finishes()
        self._farthest: dict[tuple[int, int, bool], Positions] = {}

    def _limits(self) -> list[int | None]:
        """Return the memory of each stage's device that is the stage's share."""
        cost_model, assignment = self.cost_model, self.assignment
        classes = cost_model.devices.classes
        whole = [classes[number].limit_bytes for number in assignment.classes]
        if assignment.chunks == 1 or not any(limit is not None for limit in whole):
            return whole
        stages = cost_model.stages(assignment)
        held = cost_model.held_bytes(stages, assignment)
        return [
            None if limit is None else limit * stage.memory.total_bytes // max(total, 1)
            for limit, stage, total in zip(whole, stages, held, strict=True)
        ]

    def _ends(self, stage: int) -> Positions:
        """Return, for each first position of a stage, where pins require it to end."""
        costs = self.costs
        ends: Positions = np.full(costs.num_atoms + 1, costs.num_atoms)
        pins = self.cost_model.options.pins
        if not pins:
            return ends
        kind = self.cost_model.devices.classes[self.assignment.classes[stage]].kind
        index = {entry.layer.name: layer for layer, entry in enumerate(costs.profile.layers)}
        forbidden = {
            bisect_right(costs.positions, index[pin.layer]) - 1
            for pin in pins
            if pin.stage not in (None, stage) or pin.kind not in (None, kind)
        }
        # A stage that begins at or before a forbidden atom ends in front of it.
        for atom in sorted(forbidden, reverse=True):
            ends[: atom + 1] = atom
        return ends

    def _finishes(self) -> list[Mask]:
        """Return, for each stage, the first positions from which it and later ones can be placed.

        Beyond `MAX_EXACT` positions only pins are considered, not memory.
        """
        last = self.costs.num_atoms
        places = np.arange(last + 1)
        found = [places == last]
        for stage in reversed(range(len(self.speeds))):
            can = found[-1]
            if last <= MAX_EXACT and self.limits[stage] is not None:
                found.append((self._may(stage) & can).any(axis=1))
            else:
                # `reached[p]` counts feasible positions below p: a stage that begins at p needs
                # one among those that it can end at.
                reached = np.concatenate(([0], np.cumsum(can)))
                ends = self.ends[stage]
                found.append(reached[ends + 1] > reached[np.minimum(places, ends) + 1])
        return found[::-1]

    def _may(self, stage: int) -> Mask:
        """Return True for the first and last positions with which a stage keeps pins and memory."""
        limit, replicas = self.limits[stage], self.assignment.replicas[stage]
        assert limit is not None
        places = np.arange(self.costs.num_atoms + 1)
        depth = self.depths[stage]
        tables = [self.memory_tables.table(again, depth, replicas) for again in self.choices]
        may: Mask = (places > places[:, None]) & (places <= self.ends[stage][:, None])
        may &= np.minimum.reduce(tables) <= limit
        return may

    def slowest_s(self, cuts: Cuts, recompute: tuple[bool, ...]) -> float:
        spans = zip(pairwise(cuts), recompute, self.speeds, strict=True)
        return max(float(self.work_s[again][span]) / speed for span, again, speed in spans)

    def probe(self, limit_s: float) -> tuple[Cuts, tuple[bool, ...]] | None:
        """Return cuts with no stage above the time or its memory, and the stages to recompute."""
        cuts, recompute = [0], []
        for stage, speed in enumerate(self.speeds):
            first = cuts[-1]
            reached = first
            for choice in self.choices:
                inside = self.work_s[choice][first, first + 1 :]
                # Sorted, because a stage's time grows with every layer.
                most = first + int(np.searchsorted(inside, limit_s * speed, side="right"))
                end = int(self.farthest(stage, first, choice)[most])
                if end > reached:
                    reached, again = end, choice
            if reached == first:
                return None
            cuts.append(reached)
            recompute.append(again)
        return tuple(cuts), tuple(recompute)

    def farthest(self, stage: int, first: int, again: bool) -> Positions:
        """Return the farthest allowed end of a stage up to each position; ``first`` for none."""
        key = (stage, first, again)
        if key not in self._farthest:
            places = np.arange(self.costs.num_atoms + 1)
            may = self.finishes[stage + 1] & (places > first) & (places <= self.ends[stage][first])
            limit, replicas = self.limits[stage], self.assignment.replicas[stage]
            if limit is not None:
                may &= self.memory_tables.row(first, again, self.depths[stage], replicas) <= limit
            # The running maximum is the last allowed end at or before each position.
            self._farthest[key] = np.maximum.accumulate(np.where(may, places, first))
        return self._farthest[key]


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
