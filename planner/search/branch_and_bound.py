"""The plan of least model objective, with a proof: branch and bound over the largest metrics.

A plan's objective is a sum over its stages plus the largest value of each of up to three metrics
(`docs/planner.md`). In a box a <= largest values <= b no plan is below W(b) + sum(a), where W(b)
is the least sum with every metric within b (`labels.search`). The plan found at b is a plan of
its own; splitting the box between a and what that plan realised closes the rest. With one metric
this is the interval search of design section 5.3.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np

from ...core.errors import DeadlineExceeded
from ..cost.device_classes import Devices
from .arcs import Measure, Space
from .label_setting import Found, Hop, Limits, Machine, Moves, Rules, judge, restricted, search

ROUNDING = 1e-12
"""Objectives closer than this, relatively, are equal."""

MAX_LABELS = 400_000_000
"""Candidate labels one search looks at before weights are compared more coarsely."""

FIRST_DIVE = 1024
"""The first search for a better plan keeps to a range that much narrower than the whole."""

NARROWEST_DIVE = 8
"""Nor does it keep to one much narrower than the gap that is good enough: that part of it."""

DIVES = 3
"""Plans to find that way."""

DIVE_QUANTUM = 2e-5
"""Weights closer than this part of the best value count as equal there."""

DIVE_LABELS = 2_000_000
"""Labels that such a search may look at, in a small problem."""

LABELS_PER_STAGE = 20
"""In a large one, for each of its stages."""

SPLIT_LABELS = 1_000_000
"""A box whose search would look at more labels is halved instead, while that narrows it."""

SPLIT_PER_STAGE = 4
"""The same in a large problem, for each of its stages."""

LEAST_SPLIT = 1e-6
"""Nor is one halved that is narrower than this part of a best value; it is searched to the end."""

FIRST_PIECE = 64
"""The first piece of the range of the first metric is that much narrower than the range."""

LABELS_PER_S = 1_000_000
"""About how many a search looks at in a second without numba; with it four times as many."""

MANY_STAGES = 50_000
"""Beyond so many, those that a box cannot have are dropped before it is searched."""

FEWER = 0.8
"""They are dropped where no more than this share of them would remain."""

LIMIT_GROWTH = (1.3, 1.7)
"""By how much a limit grows that no plan kept: with few stages to choose from, and with many."""

GAVE_UP = (
    "no plan was found before the deadline or before the search grew too large, and none was "
    "proven impossible; allow more time or fewer kinds of devices, or profile coarser layers"
)

Metrics = tuple[float, float, float]

NONE: Metrics = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Path:
    """A plan as the search sees it.

    Attributes:
        hops: Its stages, over the positions of the space it was found in.
        weight: The sum over its stages.
        metrics: Its largest metrics.
        value: weight + sum(metrics) + the time to sum tied gradients.
    """

    hops: tuple[Hop, ...]
    weight: float
    metrics: Metrics
    value: float

    @property
    def num_ranks(self) -> int:
        """Replicas over all stages."""
        return sum(hop.replicas for hop in self.hops)


@dataclass
class Effort:
    """When to stop, and how much was done.

    Attributes:
        deadline: On the clock of `time.monotonic`; infinite for none.
        gap: Relative gap that is good enough.
        searches: Label searches run.
        labels: Labels they kept.
    """

    deadline: float = math.inf
    gap: float = 0.0
    searches: int = 0
    labels: int = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(order=True)
class _Box:
    """Plans whose largest metrics lie between ``lower`` and ``upper``.

    Attributes:
        bound: None of them is below.
        order: In which boxes were made.
        weight: None of them has a smaller sum.
        realised: What the plan of least sum has; ``upper`` where it is not known yet.
        moves: Stages that they can have, and perhaps others.
        is_solved: Whether it is known what it has.
    """

    bound: float
    order: int
    lower: Metrics = field(compare=False)
    upper: Metrics = field(compare=False)
    weight: float = field(compare=False)
    realised: Metrics = field(compare=False)
    moves: Moves = field(compare=False)
    is_solved: bool = field(compare=False, default=True)


class BoxSearch:
    """Searches one space by one measure.

    Args:
        space: What may be chosen.
        measure: What metrics and weights stand for.
        effort: Shared by the searches of one request.
        tied_s: What every plan of this space pays at least for tied weights.
        tied_of: What a path really pays for them; by default ``tied_s``.
        best_value: Value of a plan known from elsewhere; only better ones are looked for.
        max_ranks: At most so many replicas over all stages; as many as there are by default.
    """

    def __init__(
        self,
        space: Space,
        measure: Measure,
        effort: Effort,
        *,
        tied_s: float = 0.0,
        tied_of: Callable[[tuple[Hop, ...]], float] | None = None,
        best_value: float = math.inf,
        max_ranks: int | None = None,
    ) -> None:
        self.space, self.measure, self.effort = space, measure, effort
        self.moves: Moves = space.moves(measure)
        self.machine: Machine = space.machine()
        self.rules: Rules = space.rules(measure)
        if max_ranks is not None:
            self.rules = replace(self.rules, max_ranks=max_ranks, count_ranks=True)
        self.tied_s = tied_s
        self.tied_of = tied_of
        self.best_value = best_value
        self.paths: list[Path] = []
        self.open: list[_Box] = []
        self.unproven = math.inf
        self._order = count()
        stages = min(space.tables.most_stages, int(self.machine.total.sum()))
        self.most_stages = space.options.num_stages or space.max_stages or stages

    @cached_property
    def least_weight(self) -> float:
        """No plan's sum is below."""
        return judge(self.moves, self.machine, self.rules, Limits()).least_weight

    @property
    def best(self) -> Path | None:
        """The best path found here, if it beats the value known before."""
        return min(self.paths, key=lambda path: path.value, default=None)

    @property
    def bound(self) -> float:
        """No plan of this space is below."""
        boxes = (box.bound for box in self.open)
        return min(self.best_value, self.unproven, *boxes, math.inf)

    def fewest_devices(self) -> Path | None:
        """The plan that uses fewest devices, whatever it costs."""
        return self._solve(Limits(quantum=math.inf)).best

    def every_plan(self) -> list[Path]:
        """For each number of replicas in all that some plan has, one; weights left aside."""
        self.rules = replace(self.rules, count_ranks=True)
        self._solve(Limits(quantum=math.inf), paths=2**30)
        return self.paths

    def first_plan(self) -> Path | None:
        """Any plan, soon: limits on the first metric are tried from the ideal one upwards.

        Tight limits leave few stages to choose from, so that a search within them is short.
        """
        limit = self._ideal()
        growth = LIMIT_GROWTH[self.moves.weight.size > MANY_STAGES]
        for _ in range(40):
            if self.effort.is_over:
                raise DeadlineExceeded(GAVE_UP)
            found = self._solve(Limits(first=limit, quantum=math.inf)).best
            if found is not None:
                return found
            limit *= growth
        return self.fewest_devices()

    def _even(self) -> tuple[float, float]:
        """A micro-batch's share of all work and speed, all micro-batches' together; and all work.

        In the unit of the first metric, on the slowest class where that matters.
        """
        costs, speed = self.space.tables, self.machine.speed
        whole, backward = costs.whole_s
        if self.measure != "gpipe":
            whole += backward
        slowest = self.space.devices.fastest / float(speed.max())
        power = float((self.machine.total * speed).sum()) * slowest
        return whole / power, whole / slowest

    def _ideal(self) -> float:
        """A first metric that could be had if work could be spread evenly over all devices."""
        share, work = self._even()
        if self.rules.per_replica:
            return share
        m = self.rules.num_microbatches
        return max(m * share - self.rules.spared * work, m * share * 1e-3)

    def _least_first(self) -> float:
        """No plan's first metric is below.

        n micro-batches a replica of a stage of time x keep (n - 1) x <= limit, hence it has
        r >= m / n >= m x / (limit + x) replicas, which is concave in x: the whole work as one
        stage needs least, on the slowest class.
        """
        share, work = self._even()
        if self.rules.per_replica:
            return share * (1 - 1e-9)
        if self.measure != "1f1b":
            return 0.0
        return max(0.0, (self.rules.num_microbatches * share - work) * (1 - 1e-9))

    def narrow(self, tolerance: float) -> float:
        """A lower bound of the first metric of plans better than the best one known.

        Bisection with stages judged apart from each other (`labels.judge`); a failure moves the
        bound to the next value that some stage really has (Pinar and Aykanat, JPDC 2004).
        """
        high = self._most_first()
        low = min(self._least_first(), high)
        while high - low > tolerance * self.best_value and not self.effort.is_over:
            middle = low + (high - low) / 2
            limits = Limits(first=middle, weight=self._weight_limit((low, 0.0, 0.0)))
            judged = judge(self.moves, self.machine, self.rules, limits)
            self.effort.searches += 1
            if judged.least_weight > limits.weight:
                low = min(max(judged.nexts[0], middle), high)
            else:
                high = middle
        return low

    def _restrict(self, lower: float) -> None:
        """Forget the stages that no plan better than the best has."""
        limits = Limits(first=self._most_first(), weight=self._weight_limit((lower, 0.0, 0.0)))
        judged = judge(self.moves, self.machine, self.rules, limits)
        self.moves = restricted(self.moves, judged.count)

    def _most_first(self) -> float:
        """Plans better than the best one known have a first metric of at most this."""
        return self._weight_limit(NONE) - self.least_weight

    def run(self, *, max_searches: int = 2_000) -> None:
        """Search until proven to the gap, or out of time.

        The range of the first metric is searched in pieces, each twice as wide as the one
        before: narrow ones are quick, because few stages keep their limits, and by the time the
        wide ones come a good plan is known.
        """
        if self.best_value == math.inf and self.first_plan() is None:
            return
        if self.least_weight == math.inf:
            return  # nothing here, though elsewhere a plan is known
        self._restrict(0.0)
        lower = self._dive(self.narrow(max(self.effort.gap / 2, 1e-4)))
        self._restrict(lower)
        limit = self.effort.searches + max_searches
        width = (self._most_first() - lower) / FIRST_PIECE
        width = max(width, self.effort.gap * self.best_value / 4)
        second = math.inf if self.moves.second_unit.any() else 0.0
        sync = math.inf if self.rules.max_replicas > 1 else 0.0
        while lower <= self._most_first():
            if self.effort.is_over or self.effort.searches > limit:
                self.unproven = min(self.unproven, self._bound_from(lower))
                return
            upper = min(lower + width, self._most_first())
            self._open_box(
                (lower, 0.0, 0.0), (upper, second, sync), self._bound_from(lower),
                self.least_weight, self.moves,
            )  # fmt: skip
            if upper >= self._most_first():
                break
            lower, width = upper, 2 * width
        while self.open:
            if self._closed(self.open[0].bound):
                break
            if self.effort.is_over or self.effort.searches > limit:
                return
            self._branch(heapq.heappop(self.open))
        self.open.clear()
        self.unproven = min(self.unproven, self.best_value * (1 - self.effort.gap))

    def _bound_from(self, first: float) -> float:
        """No plan with at least this first metric is below."""
        return self.least_weight + first + self.tied_s

    def _dive(self, lower: float) -> float:
        """Look for better plans just above a bound of the first metric, where that is quick.

        Weights are left aside, then compared roughly: the plans are real, but nothing is proven,
        save where there is none at all. Returns the bound, moved up past such ranges.
        """
        width = (self._most_first() - lower) / FIRST_DIVE
        width = max(width, self.effort.gap * self.best_value / NARROWEST_DIVE)
        budget = max(DIVE_LABELS, LABELS_PER_STAGE * self.moves.weight.size)
        found = 0
        while lower + width < self._most_first() and not self.effort.is_over and found < DIVES:
            limits = Limits(
                first=lower + width, weight=self._weight_limit((lower, 0.0, 0.0)), quantum=math.inf
            )
            answer = self._solve(limits, budget=budget)
            if answer.best is not None:
                found += 1
                rough = replace(limits, quantum=DIVE_QUANTUM * self.best_value)
                self._solve(rough, budget=DIVE_LABELS)
            elif answer.complete:
                lower = max(lower + width, min(answer.nexts[0], self._most_first()))
            width *= 2
        return lower

    def _closed(self, bound: float) -> bool:
        return bound >= self.best_value * (1 - max(self.effort.gap, ROUNDING))

    def _weight_limit(self, lower: Metrics) -> float:
        """Above this sum a plan of the box does not improve enough on the best one."""
        if self.best_value == math.inf:
            return math.inf
        wanted = self.best_value * (1 - self.effort.gap)
        return (wanted - sum(lower) - self.tied_s) * (1 + ROUNDING)

    def _open_box(
        self, lower: Metrics, upper: Metrics, known: float, weight: float, moves: Moves
    ) -> Metrics:
        """Solve a box at its upper corner; returns the least metrics beyond that corner.

        One that takes long is kept as it is, to be halved when its turn comes.
        """
        upper = self._within_reach(lower, upper, weight)
        limits = Limits(*upper, weight=self._weight_limit(lower))
        nexts = (math.inf, math.inf, math.inf)
        if moves.weight.size > MANY_STAGES:
            judged = judge(moves, self.machine, self.rules, limits)
            nexts = judged.nexts
            if judged.least_weight > limits.weight:
                return nexts
            if np.count_nonzero(judged.count > 0) < FEWER * np.count_nonzero(moves.room >= 0):
                moves = restricted(moves, judged.count)
        widest = _widest(lower, upper)[1]
        can_split = widest > max(self.effort.gap, LEAST_SPLIT) * self.best_value / 16
        budget = self._split_budget() if can_split else None
        answer = self._solve(limits, exact=True, budget=budget, moves=moves)
        if answer.best is not None or (can_split and not answer.complete):
            weight = max(weight, answer.bound_weight)
            bound = max(weight + sum(lower) + self.tied_s, known)
            if not self._closed(bound):
                realised = answer.best.metrics if answer.best else upper
                heapq.heappush(
                    self.open,
                    _Box(bound, next(self._order), lower, upper, weight, realised, moves,
                         is_solved=answer.best is not None),
                )  # fmt: skip
        elif not answer.complete:
            self.unproven = min(self.unproven, known)
        if not answer.complete:
            return NONE
        least = [min(pair) for pair in zip(nexts, answer.nexts, strict=True)]
        return least[0], least[1], least[2]

    def _within_reach(self, lower: Metrics, upper: Metrics, weight: float) -> Metrics:
        """The part of a box that better plans than the best can be in; none has a lighter sum."""
        spare = self._weight_limit(lower) - weight
        reach = [min(high, low + spare) for low, high in zip(lower, upper, strict=True)]
        return reach[0], reach[1], reach[2]

    def _branch(self, box: _Box) -> None:
        """Halve a box at the metric whose largest value is least certain."""
        realised = self._within_reach(box.lower, box.realised, box.weight)
        k, span = _widest(box.lower, realised)
        if span <= ROUNDING * realised[k]:
            self.unproven = min(self.unproven, box.bound)
            return
        middle = box.lower[k] + span / 2
        if middle >= realised[k]:
            middle = box.lower[k]
        nexts = self._open_box(
            box.lower, _with(box.upper, k, middle), box.bound, box.weight, box.moves
        )
        start = max(nexts[k], math.nextafter(middle, math.inf))
        lower = _with(box.lower, k, min(start, realised[k]))
        bound = max(box.bound, box.weight + sum(lower) + self.tied_s)
        if self._closed(bound):
            return
        if box.is_solved:
            heapq.heappush(
                self.open,
                replace(box, bound=bound, order=next(self._order), lower=lower),
            )
        else:
            self._open_box(lower, box.upper, bound, box.weight, box.moves)

    def _split_budget(self) -> int:
        return max(SPLIT_LABELS, SPLIT_PER_STAGE * self.moves.weight.size)

    def _budget(self) -> int:
        """Labels the next search may look at, fewer where the deadline is near."""
        if self.effort.deadline == math.inf:
            return MAX_LABELS
        left_s = max(self.effort.deadline - time.monotonic(), 0.05)
        return min(MAX_LABELS, int(left_s * LABELS_PER_S))

    def _solve(
        self,
        limits: Limits,
        *,
        exact: bool = False,
        paths: int = 4,
        budget: int | None = None,
        moves: Moves | None = None,
    ) -> _Answer:
        """One label search; exact ones are repeated more coarsely if they grow too large."""
        quantum = limits.quantum
        for _ in range(5):
            outcome = search(
                moves or self.moves, self.machine, self.rules, replace(limits, quantum=quantum),
                budget=min(budget or MAX_LABELS, self._budget()), paths=paths,
            )  # fmt: skip
            self.effort.searches += 1
            self.effort.labels += outcome.labels
            if outcome.complete:
                break
            if budget or quantum == math.inf or self.best_value == math.inf or self.effort.is_over:
                break
            finest = max(self.effort.gap, 1e-5) * self.best_value / (16 * self.most_stages)
            quantum = max(4 * quantum, finest)
        if not outcome.complete and self.best_value == math.inf:
            raise DeadlineExceeded(GAVE_UP)
        best = None
        for found in (*([outcome.best] if outcome.best else []), *outcome.others):
            path = self.path(found)
            best = best or path
            self.offer(path)
        lost = quantum * self.most_stages if quantum else 0.0
        weight = outcome.best.weight - lost if outcome.best and exact else outcome.least_weight
        return _Answer(
            best, weight, (outcome.next_first, outcome.next_second, outcome.next_sync),
            outcome.complete,
        )  # fmt: skip

    def offer(self, path: Path) -> None:
        """Remember a path; the best value is the least of all."""
        self.paths.append(path)
        self.best_value = min(self.best_value, path.value)

    def path(self, found: Found) -> Path:
        """A path with its metrics and value."""
        metrics = largest_metrics(
            found.hops, self.moves, self.machine, self.rules, self.space.devices
        )
        tied_s = self.tied_of(found.hops) if self.tied_of else self.tied_s
        value = found.weight + sum(metrics) + tied_s
        return Path(found.hops, found.weight, metrics, value)


@dataclass(frozen=True)
class _Answer:
    """A solved box: its path, the least weight any path can have, the next metrics."""

    best: Path | None
    bound_weight: float
    nexts: Metrics
    complete: bool


def _widest(lower: Metrics, upper: Metrics) -> tuple[int, float]:
    """The metric whose range is widest, and how wide that is."""
    spans = [high - low for low, high in zip(lower, upper, strict=True)]
    k = spans.index(max(spans))
    return k, spans[k]


def _with(metrics: Metrics, k: int, value: float) -> Metrics:
    changed = list(metrics)
    changed[k] = value
    return (changed[0], changed[1], changed[2])


def cut_level(hop: Hop, behind: Hop, moves: Moves, devices: Devices) -> int:
    """The link level between two neighbouring stages."""
    one = int(moves.config_class[hop.config])
    other = int(moves.config_class[behind.config])
    if one != other:
        return devices.level_between(one, other)
    return devices.classes[one].level_of(hop.end - 1, behind.end - behind.replicas)


def largest_metrics(
    hops: tuple[Hop, ...], moves: Moves, machine: Machine, rules: Rules, devices: Devices
) -> Metrics:
    """The largest value of each metric over a path's stages."""
    largest = [0.0, 0.0, 0.0]
    m = rules.num_microbatches
    for index, hop in enumerate(hops):
        start, stop = moves.start[hop.first], moves.start[hop.first + 1]
        move = int(start + moves.last[start:stop].searchsorted(hop.last))
        level = cut_level(hop, hops[index + 1], moves, devices) if index + 1 < len(hops) else 0
        unit = float(moves.first_unit[hop.config, move] + moves.metric_link[level, hop.last])
        share = -(-m // hop.replicas)
        if rules.per_replica:
            first = unit / hop.replicas
        else:
            first = float(moves.offset[hop.first]) + (share - rules.spared) * unit
        second = (share - rules.spared) * float(moves.second_unit[hop.config, move])
        sync = 0.0
        if hop.replicas > 1:
            entry = devices.classes[int(moves.config_class[hop.config])]
            group = entry.level_of(hop.end - hop.replicas, hop.end - 1)
            whole = devices.cluster.all_reduce_time_s(
                int(moves.gradients[move]), hop.replicas, group, entry.group_sizes
            )
            sync = max(0.0, whole * rules.sync_scale - float(moves.lead[hop.first]))
        for k, value in enumerate((first, second, sync)):
            largest[k] = max(largest[k], value)
    return largest[0], largest[1], largest[2]
