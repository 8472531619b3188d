"""Cuts for stages whose devices are chosen: by each one's speed and memory."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from .assignment import Assignment, Cuts
from .price import Pricer
from .room import Room
from .stage_table import Mask, Positions

PROBES = 20
"""Bisections of the slowest stage's time: to a millionth."""


def fitted_cuts(pricer: Pricer, assignment: Assignment, *, limited: bool = True) -> Cuts | None:
    """The cuts whose slowest stage is fastest among those that fit; `None` if none are found.

    Bisection on the time; each probe gives every stage, from the front, as many layers as it may
    take by time, memory and pins, and leaves the stages behind what the pins need. That is exact
    where more layers never need less memory. Stages that share a device share its memory as they
    do with the assignment's own cuts. O(S N) for the first probe, O(S log N) for the others.

    Args:
        pricer: What stages cost.
        assignment: All but the cuts.
        limited: Whether memory counts.
    """
    search = _Search(pricer, assignment, limited=limited)
    cuts = search.probe(math.inf)
    if cuts is None:
        return None
    low_s, high_s = 0.0, search.slowest_s(cuts)
    for _ in range(PROBES):
        middle_s = (low_s + high_s) / 2
        found = search.probe(middle_s)
        if found is None:
            low_s = middle_s
        else:
            cuts, high_s = found, search.slowest_s(found)
    return tuple(pricer.costs.positions[index] for index in cuts)


class _Search:
    """What each stage may hold, and how long it takes; positions are indices of the tables."""

    def __init__(self, pricer: Pricer, assignment: Assignment, *, limited: bool) -> None:
        self.costs, self.pricer, self.assignment = pricer.costs, pricer, assignment
        self.depths = pricer.depths(assignment)
        once_s = pricer.costs.forward_s + pricer.costs.backward_s
        twice_s = once_s + pricer.costs.recompute_s
        self.work_s = [twice_s if again else once_s for again in assignment.recompute]
        self.room = Room(pricer)
        classes = pricer.devices.classes
        self.speeds = [classes[number].speed for number in assignment.classes]
        self.limits = self._limits() if limited else [None] * len(self.speeds)
        self.ends = [self._ends(stage) for stage in range(len(self.speeds))]
        self.finishes = self._finishes()
        self._farthest: dict[tuple[int, int], Positions] = {}

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
        """For each stage where it may begin so that it and those behind it keep the pins."""
        last = self.costs.num_atoms
        can: Mask = np.arange(last + 1) == last
        found = [can]
        for ends in reversed(self.ends):
            reached = np.concatenate(([0], np.cumsum(can)))  # [p]: of the positions below p
            can = reached[ends + 1] > reached[np.minimum(np.arange(last + 1), ends) + 1]
            found.append(can)
        return found[::-1]

    def slowest_s(self, cuts: Cuts) -> float:
        return max(
            float(self.work_s[stage][cuts[stage], cuts[stage + 1]]) / speed
            for stage, speed in enumerate(self.speeds)
        )

    def probe(self, limit_s: float) -> Cuts | None:
        """Cuts with no stage above a time or its memory."""
        cuts = [0]
        for stage, speed in enumerate(self.speeds):
            first = cuts[-1]
            inside = self.work_s[stage][first, first + 1 :]
            most = first + int(np.searchsorted(inside, limit_s * speed, side="right"))
            reached = int(self.farthest(stage, first)[most])
            if reached == first:
                return None
            cuts.append(reached)
        return tuple(cuts)

    def farthest(self, stage: int, first: int) -> Positions:
        """The farthest place a stage may end at up to each position; ``first`` for none."""
        key = (stage, first)
        if key not in self._farthest:
            places = np.arange(self.costs.num_atoms + 1)
            may = self.finishes[stage + 1] & (places > first) & (places <= self.ends[stage][first])
            limit, one = self.limits[stage], self.assignment
            if limit is not None:
                needed = self.room.row(
                    first, one.recompute[stage], self.depths[stage], one.replicas[stage]
                )
                may &= needed <= limit
            self._farthest[key] = np.maximum.accumulate(np.where(may, places, first))
        return self._farthest[key]
