"""Cuts for stages whose devices are chosen: by each one's speed and memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..cost.assignment import Assignment, Cuts
from ..cost.plan_cost import Pricer
from ..cost.stage_table import Mask, Positions

Ways = tuple[bool, ...]
"""Whether a stage may be left as it is, recomputed, or either."""

MAX_EXACT = 200
"""Positions up to which stages in front leave those behind what their memory needs."""

PROBES = 20
"""Bisections of the slowest stage's time: to a millionth."""


def fitted(
    pricer: Pricer, assignment: Assignment, ways: Ways = (False,), *, limited: bool = True
) -> Assignment | None:
    """The assignment with the cuts whose slowest stage is fastest; `None` if none are found.

    Bisection on the time; each probe gives every stage, from the front, as many layers as it may
    take by time, memory and pins, and leaves the stages behind what pins and memory need. The
    time is exact where more layers never need less memory. Stages that share a device share its
    memory as they do with the assignment's own cuts. O(S N) rows of N.

    Args:
        pricer: What stages cost.
        assignment: All but the cuts and the recomputation.
        ways: Whether a stage may be recomputed, not, or either; then where it takes more so.
        limited: Whether memory counts.
    """
    search = _Search(pricer, assignment, ways, limited=limited)
    best = search.probe(math.inf)
    if best is None:
        return None
    low_s, high_s = 0.0, search.slowest_s(*best)
    for _ in range(PROBES):
        middle_s = (low_s + high_s) / 2
        found = search.probe(middle_s)
        if found is None:
            low_s = middle_s
        else:
            best, high_s = found, search.slowest_s(*found)
    cuts, recompute = best
    positions = pricer.costs.positions
    return replace(assignment, cuts=tuple(positions[index] for index in cuts), recompute=recompute)


class _Search:
    """What each stage may hold, and how long it takes; positions are indices of the tables."""

    def __init__(
        self, pricer: Pricer, assignment: Assignment, ways: Ways, *, limited: bool
    ) -> None:
        self.costs, self.pricer, self.assignment = pricer.costs, pricer, assignment
        self.depths = pricer.depths(assignment)
        self.ways = ways
        self.work_s = {False: pricer.costs.forward_s + pricer.costs.backward_s}
        self.work_s[True] = self.work_s[False] + pricer.costs.recompute_s
        self.room = pricer.room
        classes = pricer.devices.classes
        self.speeds = [classes[number].speed for number in assignment.classes]
        self.limits = self._limits() if limited else [None] * len(self.speeds)
        self.ends = [self._ends(stage) for stage in range(len(self.speeds))]
        self.finishes = self._finishes()
        self._farthest: dict[tuple[int, int, bool], Positions] = {}

    def _limits(self) -> list[int | None]:
        """What each stage's device has for it."""
        pricer, assignment = self.pricer, self.assignment
        classes = pricer.devices.classes
        whole = [classes[number].limit_bytes for number in assignment.classes]
        if assignment.chunks == 1 or not any(limit is not None for limit in whole):
            return whole
        stages = pricer.stages(assignment)
        held = pricer.held_bytes(stages, assignment)
        return [
            None if limit is None else limit * stage.memory.total_bytes // max(total, 1)
            for limit, stage, total in zip(whole, stages, held, strict=True)
        ]

    def _ends(self, stage: int) -> Positions:
        """For each position a stage begins at, where it has to end by the pins."""
        costs = self.costs
        ends: Positions = np.full(costs.num_atoms + 1, costs.num_atoms)
        pins = self.pricer.options.pins
        if not pins:
            return ends
        kind = self.pricer.devices.classes[self.assignment.classes[stage]].kind
        index = {entry.layer.name: layer for layer, entry in enumerate(costs.profile.layers)}
        forbidden = {
            bisect_right(costs.positions, index[pin.layer]) - 1
            for pin in pins
            if pin.stage not in (None, stage) or pin.kind not in (None, kind)
        }
        for atom in sorted(forbidden, reverse=True):
            ends[: atom + 1] = atom
        return ends

    def _finishes(self) -> list[Mask]:
        """For each stage where it may begin so that it and those behind it keep pins and memory.

        Beyond `MAX_EXACT` positions only the pins are seen to.
        """
        last = self.costs.num_atoms
        places = np.arange(last + 1)
        found = [places == last]
        for stage in reversed(range(len(self.speeds))):
            can = found[-1]
            if last <= MAX_EXACT and self.limits[stage] is not None:
                found.append((self._may(stage) & can).any(axis=1))
            else:
                reached = np.concatenate(([0], np.cumsum(can)))  # [p]: of the positions below p
                ends = self.ends[stage]
                found.append(reached[ends + 1] > reached[np.minimum(places, ends) + 1])
        return found[::-1]

    def _may(self, stage: int) -> Mask:
        """From where to where the stage keeps pins and memory."""
        limit, replicas = self.limits[stage], self.assignment.replicas[stage]
        assert limit is not None
        places = np.arange(self.costs.num_atoms + 1)
        tables = [self.room.table(way, self.depths[stage], replicas) for way in self.ways]
        may: Mask = (places > places[:, None]) & (places <= self.ends[stage][:, None])
        may &= np.minimum.reduce(tables) <= limit
        return may

    def slowest_s(self, cuts: Cuts, recompute: tuple[bool, ...]) -> float:
        spans = zip(pairwise(cuts), recompute, self.speeds, strict=True)
        return max(float(self.work_s[again][span]) / speed for span, again, speed in spans)

    def probe(self, limit_s: float) -> tuple[Cuts, tuple[bool, ...]] | None:
        """Cuts with no stage above a time or its memory, and which stages are recomputed."""
        cuts, recompute = [0], []
        for stage, speed in enumerate(self.speeds):
            first = cuts[-1]
            reached = first
            for way in self.ways:
                inside = self.work_s[way][first, first + 1 :]
                most = first + int(np.searchsorted(inside, limit_s * speed, side="right"))
                end = int(self.farthest(stage, first, way)[most])
                if end > reached:
                    reached, again = end, way
            if reached == first:
                return None
            cuts.append(reached)
            recompute.append(again)
        return tuple(cuts), tuple(recompute)

    def farthest(self, stage: int, first: int, again: bool) -> Positions:
        """The farthest place a stage may end at up to each position; ``first`` for none."""
        key = (stage, first, again)
        if key not in self._farthest:
            places = np.arange(self.costs.num_atoms + 1)
            may = self.finishes[stage + 1] & (places > first) & (places <= self.ends[stage][first])
            limit, replicas = self.limits[stage], self.assignment.replicas[stage]
            if limit is not None:
                may &= self.room.row(first, again, self.depths[stage], replicas) <= limit
            self._farthest[key] = np.maximum.accumulate(np.where(may, places, first))
        return self._farthest[key]
