"""Compare the step of plans with that of all plans there are, by an enumeration of its own.

    python benchmarks/step_brute_force.py --family closed --count 3000

Every cut, number of replicas, recomputation and placement that a small random problem allows
(`step_cases.py`) is played by a simulator of its own: ranks perform their actions in order, a link
direction carries one message at a time. Nothing here is the planner's but the rules of placement
and of memory, from the reference computation. Printed: how often the plan is the best there is, by
how much it misses, and that neither its step nor its bound contradicts the enumeration. Exits with
1 if a bound is above the best step, if a step is not the one simulated here, or if a plan misses
the best by more than 1 % where there are at most 5,000 plans.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from step_cases import FAMILIES, Case, draw_small, limit_memory

from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve
from stagewright.planner.validation.reference_cost import memory
from stagewright.planner.validation.reference_placement import StagePlacement, level_between

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_PLANS = 5_000
"""Plans up to which a planner can be expected to try them all."""

MOST_TRIED = 40_000
"""Cases with more plans are left out."""


class Stage(NamedTuple):
    """One stage of a plan: layers first to last - 1, its devices, and whether it is recomputed."""

    first: int
    last: int
    devices: tuple[int, ...]
    recompute: bool


class Times(NamedTuple):
    """Everything that decides a simulated step."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...]
    return_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    replicas: tuple[int, ...]


Plan = tuple[Stage, ...]


@dataclass(frozen=True, eq=False)
class Enumeration:
    """All plans of one case that fit the devices; hashed by identity, for the caches below."""

    case: Case

    @property
    def chunks(self) -> int:
        options = self.case.options
        return options.chunks if options.schedule == "interleaved_1f1b" else 1

    @property
    def num_layers(self) -> int:
        return len(self.case.profile.layers)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Devices that are alike, by class and in its order, full nodes first."""
        cluster = self.case.cluster
        found = (
            tuple(StagePlacement(cluster, (index,)).peers) for index in range(len(cluster.devices))
        )
        return [list(devices) for devices in dict.fromkeys(found)]

    @cached_property
    def runs(self) -> list[tuple[int, int, tuple[int, ...], bool]]:
        """Class, first rank in it, devices, and whether only a class's last stage may be there."""
        options, found = self.case.options, []
        most = min(options.max_replicas or options.num_microbatches, options.num_microbatches)
        for number, devices in enumerate(self.classes):
            for begin, end in combinations(range(len(devices) + 1), 2):
                run = tuple(devices[begin:end])
                place = StagePlacement(self.case.cluster, run)
                if end - begin <= most and not list(place.faults()):
                    found.append((number, begin, run, bool(list(place.faults(is_last=False)))))
        return found

    def layouts(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the devices of every place of a pipeline, each set of equal ones once."""
        closed = self.case.options.schedule in ("1f1b", "gpipe")
        seen = set()
        most = self.num_layers // self.chunks
        ends = tuple(len(devices) for devices in self.classes)
        for found in self._in_front((), ends, most, closed):
            # Idle devices between stages matter only by the links they change.
            key = tuple(
                (self._class(run), len(run), self.level(run[-1], behind[0]) if behind else -1,
                 StagePlacement(self.case.cluster, run).all_reduce_s(10**9))
                for run, behind in zip(found, (*found[1:], ()), strict=True)
            )  # fmt: skip
            if key not in seen:
                seen.add(key)
                yield found

    def _in_front(
        self, behind: tuple[tuple[int, ...], ...], ends: tuple[int, ...], most: int, closed: bool
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        if behind:
            yield behind
        if len(behind) == most:
            return
        used = {self._class(run) for run in behind}
        for number, begin, run, only_last in self.runs:
            if begin + len(run) > ends[number] or (only_last and number in used):
                continue
            if behind and not closed and len(run) != len(behind[0]):
                continue
            left = (*ends[:number], begin, *ends[number + 1 :])
            yield from self._in_front((run, *behind), left, most, closed)

    def _class(self, run: tuple[int, ...]) -> int:
        return next(number for number, devices in enumerate(self.classes) if run[0] in devices)

    def plans(self) -> Iterator[Plan]:
        """Yield every plan, whether or not it fits."""
        choices = {"never": (False,), "auto": (False, True), "always": (True,)}
        again = choices[self.case.options.recompute]
        for layout in self.layouts():
            places = layout * self.chunks
            count = len(places)
            if self._is_refused(len(layout), len(layout[0])):
                continue
            for inner in combinations(range(1, self.num_layers), count - 1):
                cuts = list(pairwise((0, *inner, self.num_layers)))
                for recompute in product(again, repeat=count):
                    yield tuple(
                        Stage(*span, devices, choice)
                        for span, devices, choice in zip(cuts, places, recompute, strict=True)
                    )

    def _is_refused(self, places: int, replicas: int) -> bool:
        """Interleaved micro-batches go in equal rounds over the places."""
        if self.chunks == 1:
            return False
        m = self.case.options.num_microbatches
        return any(
            share % max(1, share // places) for share in {m // replicas, -(-m // replicas)} - {0}
        )

    def level(self, one: int, other: int) -> int:
        return _level(self, one, other)

    def limit(self, device: int) -> int | None:
        found = self.case.cluster.devices[device].memory_bytes
        return None if found is None else int(found * self.case.options.memory_fraction)

    def peak_bytes(self, found: Plan) -> int:
        """Return the bytes that the fullest device needs beyond its limit, or in all."""
        needed: dict[int, int] = {}
        for place, stage in enumerate(found):
            depth = self.in_flight(tuple(len(entry.devices) for entry in found))[place]
            needed[stage.devices[0]] = needed.get(stage.devices[0], 0) + _memory(
                self, stage.first, stage.last, stage.recompute, len(stage.devices), depth
            )
        return max(needed.values())

    def fits(self, found: Plan) -> bool:
        limit = self.limit(0)
        return limit is None or self.peak_bytes(found) <= limit

    def in_flight(self, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """Return the micro-batches between their forward and backward on the first replica."""
        return _in_flight(self.case.options.schedule, self._dealt(replicas), replicas, self.chunks)

    def _dealt(self, replicas: tuple[int, ...]) -> int:
        return self.case.options.num_microbatches

    def times(self, found: Plan) -> Times:
        """Return the durations of a plan's step."""
        work = [
            _work(self, stage.first, stage.last, self._speed(stage), stage.recompute)
            for stage in found
        ]
        there, back = self._sends(found)
        return Times(
            forward_s=tuple(forward_s for forward_s, _ in work),
            backward_s=tuple(backward_s for _, backward_s in work),
            send_s=there,
            return_s=back,
            sync_s=tuple(_sync(self, stage.first, stage.last, stage.devices) for stage in found),
            replicas=tuple(len(stage.devices) for stage in found),
        )

    def _speed(self, stage: Stage) -> float:
        return self.case.cluster.devices[stage.devices[0]].speed

    def _sends(self, found: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
        there, back = [], []
        for one, two in pairwise(found):
            gap = self.case.profile.boundaries[one.last - 1]
            if one.devices == two.devices:
                there.append(0.0)
                back.append(0.0)
                continue
            link = self.case.cluster.levels[self.level(one.devices[-1], two.devices[0])]
            there.append(link.transfer_time_s(gap.forward_bytes))
            back.append(link.transfer_time_s(gap.backward_bytes))
        return tuple(there), tuple(back)


@cache
def _level(found: Enumeration, one: int, other: int) -> int:
    return level_between(found.case.cluster, one, other)


@cache
def _work(
    found: Enumeration, first: int, last: int, speed: float, recompute: bool
) -> tuple[float, float]:
    layers = found.case.profile.layers[first:last]
    forward_s = sum(entry.forward.median_s for entry in layers)
    backward_s = sum(entry.backward.median_s for entry in layers)
    return forward_s / speed, (backward_s + forward_s * recompute) / speed


@cache
def _memory(
    found: Enumeration, first: int, last: int, recompute: bool, replicas: int, depth: int
) -> int:
    options = found.case.options
    own = -(-options.num_microbatches // replicas)
    return memory(
        found.case.profile, options, range(first, last), recompute=recompute, microbatches=own,
        held=depth,
    ).total_bytes  # fmt: skip


@cache
def _sync(found: Enumeration, first: int, last: int, devices: tuple[int, ...]) -> float:
    layers = range(first, last)
    size = sum(
        entry.size_bytes for entry in found.case.profile.parameters if entry.layers[0] in layers
    )
    return StagePlacement(found.case.cluster, devices).all_reduce_s(size)


# The schedules, written down again as their papers have them. An action is a kind (0 forward,
# 1 backward, 2 input part, 3 weight part), a stage, and a micro-batch.


@cache
def rank_orders(
    schedule: str, m: int, replicas: tuple[int, ...], chunks: int
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return what every rank does in order, rank by rank."""
    places = len(replicas) // chunks
    depths = [1] * places
    for place in range(places - 2, -1, -1):
        # One round more than what the next stage has in flight (1F1B, for replicas that differ).
        ahead = depths[place + 1] * replicas[place + 1]
        depths[place] = 1 + -(-ahead // replicas[place])
    orders = []
    for place in range(places):
        for replica in range(replicas[place]):
            own = list(range(replica, m, replicas[place]))
            orders.append(_order_of(schedule, own, place, places, depths[place], chunks))
    return tuple(orders)


def _order_of(
    schedule: str, own: list[int], place: int, places: int, depth: int, chunks: int
) -> tuple[tuple[int, int, int], ...]:
    n, actions = len(own), []
    if schedule == "interleaved_1f1b":
        run = n // max(1, n // places)
        depth = min((chunks - 1) * run + 2 * (places - 1 - place) + 1, n * chunks)
        forwards, backwards = [], []
        for begin in range(0, n, run):  # one round: each chunk takes the same micro-batches
            for chunk in range(chunks):
                forwards += [(0, chunk * places + place, k) for k in own[begin : begin + run]]
                back = (chunks - 1 - chunk) * places + place
                backwards += [(1, back, k) for k in own[begin : begin + run]]
    else:
        kind = 2 if schedule == "zero_bubble" else 1
        forwards = [(0, place, k) for k in own]
        backwards = [(kind, place, k) for k in own]
        depth = {"gpipe": n, "zero_bubble": places - place}.get(schedule, depth)
        depth = min(depth, n)
    total = len(forwards)
    actions = forwards[:depth]
    for index in range(total):
        actions.append(backwards[index])
        if schedule == "zero_bubble" and index >= place:
            actions.append((3, place, own[index - place]))
        if depth + index < total:
            actions.append(forwards[depth + index])
    if schedule == "zero_bubble":
        actions += [(3, place, k) for k in own[max(0, n - place) :]]
    return tuple(actions)


@cache
def _in_flight(schedule: str, m: int, replicas: tuple[int, ...], chunks: int) -> tuple[int, ...]:
    """Return the most micro-batches a stage's replicas hold at once, by their order of work."""
    most = [0] * len(replicas)
    ends = 3 if schedule == "zero_bubble" else 1
    for order in rank_orders(schedule, m, replicas, chunks):
        held: dict[int, int] = {}
        for kind, stage, _ in order:
            held[stage] = held.get(stage, 0) + (kind == 0) - (kind == ends)
            most[stage] = max(most[stage], held[stage])
    return tuple(most)


class Played(NamedTuple):
    """The orders of one shape of pipeline as arrays: actions of all ranks one after another."""

    first: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints
    stage_rank: Ints


@cache
def played(schedule: str, m: int, replicas: tuple[int, ...], chunks: int) -> Played:
    orders = rank_orders(schedule, m, replicas, chunks)
    flat = np.array([action for order in orders for action in order], np.int64)
    places = len(replicas) // chunks
    begins = np.cumsum([0, *replicas[:places]])
    ranks = np.zeros((len(replicas), m), np.int64)
    for stage in range(len(replicas)):
        for k in range(m):
            ranks[stage, k] = begins[stage % places] + k % replicas[stage]
    first = np.cumsum([0, *map(len, orders)])
    return Played(first, flat[:, 0].copy(), flat[:, 1].copy(), flat[:, 2].copy(), ranks)


def play(
    first: Ints, kind: Ints, stage: Ints, microbatch: Ints, stage_rank: Ints, forward_s: Floats,
    backward_s: Floats, send_s: Floats, return_s: Floats, sync_s: Floats,
) -> float:  # fmt: skip
    """Return when everything is done: ranks take turns until none can go on.

    A message leaves when it is made and the one before it on its channel is through; a rank has
    one channel to the stages behind and one to those in front.
    """
    ranks, (stages, m) = len(first) - 1, stage_rank.shape
    came = np.full((2, stages, m), -1.0)  # when the input of a forward, a backward is there
    came[0, 0, :] = 0.0
    ended = np.full((stages, m), -1.0)  # own forwards
    at, free, line = first[:-1].copy(), np.zeros(ranks), np.zeros((2, ranks))
    done = np.zeros(stages)
    went_on = True
    while went_on:
        went_on = False
        for rank in range(ranks):
            while at[rank] < first[rank + 1]:
                action = at[rank]
                what, s, k = kind[action], stage[action], microbatch[action]
                start = free[rank]
                if what == 0:
                    if came[0, s, k] < 0:
                        break
                    end = max(start, came[0, s, k]) + forward_s[s]
                    ended[s, k] = end
                    if s + 1 < stages:
                        arrival = end
                        if send_s[s] > 0 and stage_rank[s + 1, k] != rank:
                            line[0, rank] = max(end, line[0, rank]) + send_s[s]
                            arrival = line[0, rank]
                        came[0, s + 1, k] = arrival
                    else:
                        came[1, s, k] = end
                elif what == 3:
                    end = start + backward_s[s] / 2
                else:
                    if came[1, s, k] < 0 or ended[s, k] < 0:
                        break
                    work = backward_s[s] / 2 if what == 2 else backward_s[s]
                    end = max(start, came[1, s, k]) + work
                    if s > 0:
                        arrival = end
                        if return_s[s - 1] > 0 and stage_rank[s - 1, k] != rank:
                            line[1, rank] = max(end, line[1, rank]) + return_s[s - 1]
                            arrival = line[1, rank]
                        came[1, s - 1, k] = arrival
                free[rank] = end
                done[s] = max(done[s], end)
                at[rank] += 1
                went_on = True
    for rank in range(ranks):
        if at[rank] < first[rank + 1]:
            return np.inf  # never finishes
    return float((done + sync_s).max())


def step_s(found: Enumeration, times: Times) -> float:
    """Return the simulated step of a plan."""
    options = found.case.options
    order = played(options.schedule, options.num_microbatches, times.replicas, found.chunks)
    columns = (np.array(column, np.float64) for column in times[:5])
    return float(_compiled()(*order, *columns))


@cache
def _compiled() -> Callable[..., float]:
    import numba

    compiled: Any = numba.njit(play)
    found: Callable[..., float] = compiled
    return found


@dataclass(frozen=True)
class Outcome:
    """One case: all its plans, the best step, and what was planned."""

    name: str
    plans: int
    best_s: float
    step_s: float
    bound_s: float
    own_step_s: float
    plan_s: float

    @property
    def miss(self) -> float:
        return self.step_s / self.best_s - 1


def judge(case: Case) -> Outcome | None:
    """Enumerate and plan one case; nothing if it has too many plans or none fits."""
    case = _bound_memory(case)
    found = Enumeration(case)
    best_s, best, count, seen = float("inf"), None, 0, {}
    for each in found.plans():
        count += 1
        if count > MOST_TRIED:
            return None
        if not found.fits(each):
            continue
        times = found.times(each)
        if times not in seen:
            seen[times] = step_s(found, times)
        if seen[times] < best_s:
            best_s, best = seen[times], each
    began = time.process_time()
    try:
        request = PlanningRequest(case.profile, case.cluster, case.options)
        decision = solve(request)
    except (Infeasible, InvalidInput):
        if best is not None:
            raise AssertionError(f"{case.name}: refused, but {best} fits") from None
        return None
    took_s = time.process_time() - began
    chosen = decision.costed.assignment
    own = tuple(
        Stage(*span, chosen.device_indices(request.devices, number), chosen.recompute[number])
        for number, span in enumerate(pairwise(chosen.cuts))
    )
    return Outcome(
        case.name, count, best_s, decision.costed.step_time_s, decision.simulated_bound_s,
        step_s(found, found.times(own)), took_s,
    )  # fmt: skip


def _bound_memory(case: Case) -> Case:
    """Return half of the cases with a limit that some of the plans keep."""
    draw = random.Random(f"memory {case.name}")
    if draw.random() < 0.5:
        return case
    found, needs = Enumeration(case), []
    for count, each in enumerate(found.plans()):
        if count > MOST_TRIED:
            return case
        needs.append(found.peak_bytes(each))
    needs.sort()
    return limit_memory(case, needs[int(len(needs) * draw.choice([0.02, 0.1, 0.3, 0.6]))] + 1)


def forget() -> None:
    """Empty the caches of one case."""
    for cached in (_level, _work, _memory, _sync):
        cached.cache_clear()


def report(family: str, found: list[Outcome]) -> int:
    """Print the figures of a family; return the number of failures."""
    small = [entry for entry in found if entry.plans <= MOST_PLANS]
    failures = 0
    for entry in found:
        problems = []
        if entry.bound_s > entry.best_s * (1 + 1e-9):
            problems.append(f"bound {entry.bound_s} above the best step {entry.best_s}")
        if abs(entry.own_step_s - entry.step_s) > 1e-9 * entry.step_s:
            problems.append(f"step {entry.step_s} is {entry.own_step_s} here")
        if entry.step_s < entry.best_s * (1 - 1e-9):
            problems.append(f"step {entry.step_s} below the best of all plans {entry.best_s}")
        if entry.plans <= MOST_PLANS and entry.miss > 0.01:
            problems.append(f"{entry.miss:.1%} slower than the best of {entry.plans} plans")
        for problem in problems:
            print(f"{entry.name}: {problem}")
        failures += bool(problems)
    best = sum(entry.miss <= 1e-9 for entry in found)
    gaps = [entry.step_s / entry.bound_s - 1 for entry in found]
    print(
        f"{family}: {len(found)} cases, best in {best} ({best / len(found):.2%}); worst miss "
        f"{max(entry.miss for entry in found):.2%}, of the {len(small)} with at most "
        f"{MOST_PLANS:,} plans {max(entry.miss for entry in small):.2%}; printed gap median "
        f"{statistics.median(gaps):.2%}, largest {max(gaps):.2%}; planning took "
        f"{1e3 * statistics.median(entry.plan_s for entry in found):.0f} ms in the median, "
        f"{1e3 * max(entry.plan_s for entry in found):.0f} ms at most"
    )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--family", choices=FAMILIES, default="closed")
    parser.add_argument("--count", type=int, default=200, help="cases judged")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one drawn")
    parser.add_argument("--json", action="store_true", help="one object a case, too")
    arguments = parser.parse_args()
    found: list[Outcome] = []
    seed = arguments.first
    while len(found) < arguments.count:
        outcome = judge(draw_small(arguments.family, seed))
        seed += 1
        forget()
        if outcome is not None:
            found.append(outcome)
            if arguments.json:
                print(json.dumps(asdict(outcome)), flush=True)
    return 1 if report(arguments.family, found) else 0


if __name__ == "__main__":
    sys.exit(main())
