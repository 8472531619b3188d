"""Compare plans with what simulated annealing finds in half a minute.

    python benchmarks/annealing.py --count 40 --seconds 30

The annealing moves, splits, merges and recomputes stages, and gives devices to others, from equal
stages on; its steps are played by the simulator of `step_brute_force.py`, memory and placement are
those of the reference computation. Exits with 1 if it finds a plan more than 0.5 % faster.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from step_brute_force import Enumeration, Plan, Stage, forget, step_s
from step_cases import Case, draw_medium, limit_memory

from stagewright.core.errors import Infeasible
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve
from stagewright.planner.validation.reference_placement import StagePlacement

WORST = 0.005
"""Relative distance that a plan may be behind."""

RESTARTS = 3
"""Annealings within the time, each from the start again; every one cools down once."""


@dataclass(frozen=True)
class Draft:
    """Layers, devices, class and recomputation of every stage."""

    counts: tuple[int, ...]
    replicas: tuple[int, ...]
    classes: tuple[int, ...]
    recompute: tuple[bool, ...]


class Annealing:
    """Search of one case by random moves."""

    def __init__(self, case: Case, seed: int) -> None:
        self.found, self.draw = Enumeration(case), random.Random(seed)
        self.options = case.options
        self.has_equal = case.options.schedule == "zero_bubble"
        self.best_s = math.inf
        self.best: Plan | None = None

    def run(self, seconds: float) -> float:
        """Return the least step found in that many seconds of this process."""
        for number in range(RESTARTS):
            self._anneal(self._start(number), seconds / RESTARTS)
        return self.best_s

    def _start(self, number: int) -> Draft:
        """Equal layer counts on as many stages as there are devices, half of them, or one."""
        devices, layers = len(self.found.classes[0]), self.found.num_layers
        stages = max(1, min(layers, devices >> number))
        each, more = divmod(layers, stages)
        counts = tuple(each + (stage < more) for stage in range(stages))
        again = self.options.recompute != "never"
        return Draft(counts, (1,) * stages, (0,) * stages, (again,) * stages)

    def _anneal(self, draft: Draft, seconds: float) -> None:
        began = time.process_time()
        own_s = self._step_s(draft)
        while (share := (time.process_time() - began) / seconds) < 1:
            other = self._move(draft)
            if other is None:
                continue
            other_s = self._step_s(other)
            heat = 0.05 * (1 - share) ** 2 + 1e-5
            worse = (other_s - own_s) / own_s if own_s < math.inf else -1.0
            if worse <= 0 or self.draw.random() < math.exp(-worse / heat):
                draft, own_s = other, other_s

    def _step_s(self, draft: Draft) -> float:
        """Return the step, infinite if the plan does not fit or breaks a rule of placement."""
        plan = self._place(draft)
        if plan is None:
            return math.inf
        if not self.found.fits(plan):
            return math.inf
        found_s = step_s(self.found, self.found.times(plan))
        if found_s < self.best_s:
            self.best_s, self.best = found_s, plan
        return found_s

    def _place(self, draft: Draft) -> Plan | None:
        """Give the devices of each class to its stages in order."""
        cuts, stages = list(accumulate(draft.counts, initial=0)), []
        used: dict[int, int] = {}
        for number, count in enumerate(draft.replicas):
            owner = draft.classes[number]
            begin = used.get(owner, 0)
            devices = tuple(self.found.classes[owner][begin : begin + count])
            used[owner] = begin + count
            if len(devices) < count:
                return None
            last = owner not in draft.classes[number + 1 :]
            if list(StagePlacement(self.found.case.cluster, devices).faults(is_last=last)):
                return None
            span = cuts[number], cuts[number + 1]
            stages.append(Stage(*span, devices, draft.recompute[number]))
        return tuple(stages)

    def _move(self, draft: Draft) -> Draft | None:
        """Return a neighbour, or nothing if the move that was drawn cannot be made."""
        moves = [self._shift, self._shift, self._shift, self._resize, self._split, self._merge]
        if self.options.recompute == "auto":
            moves.append(self._recompute)
        if len(self.found.classes) > 1:
            moves.append(self._reclass)
        other = self.draw.choice(moves)(draft)
        most = self.options.max_replicas or self.options.num_microbatches
        if other is None or not 1 <= min(other.replicas) <= max(other.replicas) <= most:
            return None
        return other

    def _shift(self, draft: Draft) -> Draft | None:
        if len(draft.counts) < 2:
            return None
        counts, step = list(draft.counts), self.draw.choice([1, 1, 1, 2, 3])
        one = self.draw.randrange(len(counts))
        near = [place for place in (one - 1, one + 1) if 0 <= place < len(counts)]
        other = self.draw.choice([*near, self.draw.randrange(len(counts))])
        if one == other or counts[one] <= step:
            return None
        counts[one] -= step
        counts[other] += step
        return self._with(draft, counts=counts)

    def _resize(self, draft: Draft) -> Draft | None:
        replicas, step = list(draft.replicas), self.draw.choice([1, 1, 1, 2, 4])
        if self.has_equal:
            count = max(1, replicas[0] + self.draw.choice([-1, 1]))
            return self._with(draft, replicas=[count] * len(replicas))
        taken, given = (self.draw.randrange(-1, len(replicas)) for _ in range(2))
        if taken >= 0:
            replicas[taken] -= step
        if given >= 0:
            replicas[given] += step
        return self._with(draft, replicas=replicas)

    def _split(self, draft: Draft) -> Draft | None:
        place = self.draw.randrange(len(draft.counts))
        count, devices = draft.counts[place], draft.replicas[place]
        if count < 2:
            return None
        front = self.draw.randrange(1, count)
        pair = [devices, devices] if self.has_equal or devices == 1 else None
        if pair is None:
            first = self.draw.randrange(1, devices)
            pair = [first, devices - first]
        return Draft(
            _put(draft.counts, place, 1, [front, count - front]),
            _put(draft.replicas, place, 1, pair),
            _put(draft.classes, place, 1, [draft.classes[place]] * 2),
            _put(draft.recompute, place, 1, [draft.recompute[place]] * 2),
        )

    def _merge(self, draft: Draft) -> Draft | None:
        if len(draft.counts) < 2:
            return None
        place = self.draw.randrange(len(draft.counts) - 1)
        pair = draft.replicas[place : place + 2]
        joined = pair[0] if self.has_equal else self.draw.choice([pair[0], pair[1], sum(pair)])
        return Draft(
            _put(draft.counts, place, 2, [sum(draft.counts[place : place + 2])]),
            _put(draft.replicas, place, 2, [joined]),
            _put(draft.classes, place, 2, [self.draw.choice(draft.classes[place : place + 2])]),
            _put(draft.recompute, place, 2, [any(draft.recompute[place : place + 2])]),
        )

    def _recompute(self, draft: Draft) -> Draft:
        place = self.draw.randrange(len(draft.counts))
        changed = _put(draft.recompute, place, 1, [not draft.recompute[place]])
        return Draft(draft.counts, draft.replicas, draft.classes, changed)

    def _reclass(self, draft: Draft) -> Draft:
        place = self.draw.randrange(len(draft.counts))
        owner = self.draw.randrange(len(self.found.classes))
        changed = _put(draft.classes, place, 1, [owner])
        return Draft(draft.counts, draft.replicas, changed, draft.recompute)

    def _with(
        self, draft: Draft, counts: list[int] | None = None, replicas: list[int] | None = None
    ) -> Draft:
        return Draft(
            tuple(counts or draft.counts), tuple(replicas or draft.replicas), draft.classes,
            draft.recompute,
        )  # fmt: skip


def _put(values: tuple, place: int, width: int, new: list) -> tuple:  # type: ignore[type-arg]
    return (*values[:place], *new, *values[place + width :])


def cases(first: int) -> Iterator[Case]:
    """Yield medium cases, every other one with memory that binds."""
    seed = first
    while True:
        case = draw_medium(seed)
        if seed % 4 < 2:
            roomy = solve(PlanningRequest(case.profile, case.cluster, case.options)).costed
            needs = max(stage.memory.total_bytes for stage in roomy.stages)
            share = random.Random(seed).choice([0.6, 0.8, 0.95])
            case = limit_memory(case, int(share * needs))
        yield case
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of processor time for each")
    arguments = parser.parse_args()
    behind, done = [], 0
    for case in cases(arguments.first):
        if done == arguments.count:
            break
        began = time.process_time()
        try:
            made = solve(PlanningRequest(case.profile, case.cluster, case.options))
        except Infeasible:
            continue
        took_s = time.process_time() - began
        done += 1
        other_s = Annealing(case, done).run(arguments.seconds)
        forget()
        ours_s = made.costed.step_time_s
        behind.append(ours_s / other_s - 1)
        gap = ours_s / made.simulated_bound_s - 1
        options = case.options
        print(
            f"{case.name}: {options.schedule}, {len(case.profile.layers)} layers, "
            f"{len(case.cluster.devices)} devices, m {options.num_microbatches}: plan "
            f"{1e3 * ours_s:.2f} ms ({took_s:.2f} s, gap {gap:.2%}), annealing "
            f"{1e3 * other_s:.2f} ms, plan slower by {behind[-1]:+.3%}",
            flush=True,
        )
    worse = sum(entry > 1e-6 for entry in behind)
    print(f"{done} cases: the plan is slower in {worse}, by {max(behind):.3%} at most; "
          f"faster by up to {-min(behind):.1%}")  # fmt: skip
    return 1 if max(behind) > WORST else 0


if __name__ == "__main__":
    sys.exit(main())
