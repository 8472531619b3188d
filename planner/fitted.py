"""Cuts for stages whose devices are chosen: by each one's speed and memory."""

from __future__ import annotations

import math

from .assignment import Assignment, Cuts
from .price import Pricer

PROBES = 20
"""Bisections of the slowest stage's time: to a millionth."""


def fitted_cuts(pricer: Pricer, assignment: Assignment) -> Cuts | None:
    """The cuts whose slowest stage is fastest among those that fit; `None` if none are found.

    Bisection on the time; each probe gives every stage, from the front, as many layers as it may
    take. That is exact where more layers never need less memory, but for receive buffers. Stages
    that share a device share its memory as they do with the assignment's own cuts. O(S log N) a
    probe.
    """
    search = _Search(pricer, assignment)
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

    def __init__(self, pricer: Pricer, assignment: Assignment) -> None:
        self.costs, self.pricer, self.assignment = pricer.costs, pricer, assignment
        self.depths = pricer.depths(assignment)
        self.work_s = pricer.costs.forward_s + pricer.costs.backward_s
        classes = pricer.devices.classes
        self.speeds = [classes[number].speed for number in assignment.classes]
        stages = pricer.stages(assignment)
        held = pricer.held_bytes(stages, assignment)
        self.limits = [
            None
            if stage.limit_bytes is None
            else stage.limit_bytes * stage.memory.total_bytes // max(total, 1)
            for stage, total in zip(stages, held, strict=True)
        ]

    def slowest_s(self, cuts: Cuts) -> float:
        return max(
            float(self.work_s[cuts[stage], cuts[stage + 1]]) / speed
            for stage, speed in enumerate(self.speeds)
        )

    def probe(self, limit_s: float) -> Cuts | None:
        """Cuts with no stage above a time or its memory."""
        cuts = [0]
        count, last = len(self.speeds), self.costs.num_atoms
        for stage in range(count):
            most = last - (count - 1 - stage)
            reached = self._reach(stage, cuts[-1], most, limit_s)
            if reached == cuts[-1]:
                return None
            cuts.append(reached)
        return tuple(cuts) if cuts[-1] == last else None

    def _reach(self, stage: int, first: int, most: int, limit_s: float) -> int:
        """How far a stage that begins there may go, by bisection; ``first`` if nowhere."""
        if self._takes(stage, first, most, limit_s):
            return most
        low, high = first, most
        while high - low > 1:
            middle = (low + high) // 2
            if self._takes(stage, first, middle, limit_s):
                low = middle
            else:
                high = middle
        return low

    def _takes(self, stage: int, first: int, last: int, limit_s: float) -> bool:
        if self.work_s[first, last] / self.speeds[stage] > limit_s:
            return False
        limit = self.limits[stage]
        if limit is None:
            return True
        replicas, again = self.assignment.replicas[stage], self.assignment.recompute[stage]
        needed = self.pricer.memory((first, last), again, self.depths[stage], replicas)
        return needed.total_bytes <= limit
