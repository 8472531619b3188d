"""Branch and bound over the largest metrics: the plan of least model objective, with a proof.

A plan's objective is a sum over its stages, the longest exposed summing of gradients, and the
largest value of each of up to two metrics (`docs/concepts/planner.md`). Label setting minimises the
first two together, a path's total; branch and bound takes care of the metrics.

Box (a node of the search): the plans whose largest metrics lie between a and b, per metric.
Bound: no plan of the box is below W(b) + sum(a), where W(b) is the least total with every metric
    within b. One label search with caps b computes W(b).
Incumbent: the plan that search finds has a total of W(b); its largest metrics, which may be well
    below b, are what it attained.
Branching: between a and the attained metrics, halve the widest range. The lower half is a new
    label search; the upper half inherits W(b), which is still a bound for it, and starts at the
    next value above the lower half that any stage can have.
Ends when the least bound of all open boxes is within the gap of the incumbent.

With one metric this is the interval search of design section 5.3. Each label search takes
O(arcs x labels per position); their number is not bounded by a polynomial, but is 30 to 100 for
the problems of `docs/evidence/planning-time.md`.
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
from .arcs import Measure, MetricCaps, SearchRules, SearchSpace, StageArc, StageArcs
from .device_pool import DevicePool, Integers
from .label_setting import ArcPath, Relaxation, relax, search

ROUNDING = 1e-12
"""Objectives closer than this, relatively, are equal."""

MAX_LABELS = 400_000_000
"""Candidate labels one search looks at before weights are compared more coarsely."""

SPLIT_LABELS = 1_000_000
"""A box whose search would look at more labels is halved instead, while that narrows it.

Its halves may look at twice as many. Where halving shortens no search, as with many replicas, one
is then carried through before the searches given up have taken longer than it.
"""

SPLIT_PER_ARC = 4
"""The same limit in a large problem, per arc."""

MOST_GIVEN_UP = 200_000_000
"""Candidate labels of all searches given up, after which a proof is: some ten seconds.

A quarter in a problem of a million arcs, where four times as many raised the bound by 0.1 %.
"""

HUGE = 1_000_000
"""Arcs of such a problem."""

LONG = 300_000
"""Arcs from which a plan is looked for just above the bound before boxes are opened.

Boxes took a minute to find one for 10,000 layers, and are empty where one near the bound is known.
"""

NARROW_BEAM = 8
"""Labels of a position that the search just above the bound keeps."""

LEAST_TOLERANCE = 1e-4
"""Relative tolerance of bounds on the first metric where a smaller gap is asked for."""

LEAST_SPLIT = 1e-6
"""A box narrower than this, relative to the best value, is searched to the end."""

CLOSING = 2.5e-5
"""Plans are sought that improve by the gap less this, or less a quarter of it.

Boxes are closed at the whole gap: were the two equal, every halving of a box would halve what it
lacks of being closed, without end.
"""

FIRST_RANGE = 256
"""The first range of the first metric is the whole range divided by this."""

LABELS_PER_S = 1_000_000
"""Candidate labels per second: what compiled code manages at least."""

MANY_ARCS = 50_000
"""Beyond that many, caps grow faster until a first plan keeps them."""

BEAM = 64
"""Labels of a position that a quick search over several classes of devices keeps."""

CAP_GROWTH = (1.3, 1.7)
"""Factor for a cap that no plan kept: with few arcs to choose from, and with many."""

FIRST_PLAN_TRIES = 40
"""Caps tried before the first metric is left free: 1.3 to the 40th is 36,000 times the ideal."""

GAVE_UP = (
    "no plan was found before the deadline or before the search grew too large, and none was "
    "proven impossible; allow more time or fewer kinds of devices, or profile coarser layers"
)

Metrics = tuple[float, float]

NONE: Metrics = (0.0, 0.0)


@dataclass(frozen=True)
class StagePath:
    """A plan as the search sees it.

    Its value is the sum of its total, largest metrics and the time to sum tied gradients.
    """

    arcs: tuple[StageArc, ...]
    total: float
    metrics: Metrics
    value: float

    @property
    def num_replicas(self) -> int:
        """Return the replicas of all stages."""
        return sum(arc.replicas for arc in self.arcs)


@dataclass
class Effort:
    """Deadline and gap of a request, and the work done for it so far.

    The deadline is on the clock of `time.monotonic`; a plan within the relative ``gap`` is good
    enough.
    """

    deadline: float = math.inf
    gap: float = 0.0
    searches: int = 0
    labels: int = 0

    @property
    def is_over(self) -> bool:
        """Return True once the deadline has passed."""
        return time.monotonic() > self.deadline


@dataclass(order=True)
class _Box:
    """Plans whose largest metrics lie between ``lower`` and ``upper``.

    Attributes:
        bound: A lower bound of their values; boxes are explored by it.
        order: Sequence number, to settle ties.
        weight: A lower bound of their totals.
        attained: Metrics of the plan of least total; ``upper`` where it is not known yet.
        arcs: All arcs that they can have, and perhaps others.
        is_solved: False if the box's own search was given up as too long.
        given_up: Boxes around it, itself included, whose searches were.
    """

    bound: float
    order: int
    lower: Metrics = field(compare=False)
    upper: Metrics = field(compare=False)
    weight: float = field(compare=False)
    attained: Metrics = field(compare=False)
    arcs: StageArcs = field(compare=False)
    is_solved: bool = field(compare=False, default=True)
    given_up: int = field(compare=False, default=0)


@dataclass(frozen=True)
class _Solution:
    """Result of one label search: its best path, a bound of all weights, the next metrics."""

    best: StagePath | None
    bound_weight: float
    next_metrics: Metrics
    complete: bool
    replicas: Integers | None = None


class BranchAndBound:
    """Search of one space by one measure.

    The ``effort`` is shared by the searches of one request. Every plan of the space pays at least
    ``tied_s`` for tied weights, a path what ``tied_of`` returns. Only plans better than
    ``best_value``, known from elsewhere, are looked for.
    """

    def __init__(
        self,
        space: SearchSpace,
        measure: Measure,
        effort: Effort,
        *,
        tied_s: float = 0.0,
        tied_of: Callable[[tuple[StageArc, ...]], float] | None = None,
        best_value: float = math.inf,
        max_total_replicas: int | None = None,
    ) -> None:
        self.space, self.measure, self.effort = space, measure, effort
        self.arcs: StageArcs = space.arcs(measure)
        self.pool: DevicePool = space.pool()
        self.rules: SearchRules = space.rules(measure)
        if max_total_replicas is not None:
            self.rules = self.rules._replace(
                max_total_replicas=max_total_replicas, count_replicas=True
            )
        self.tied_s = tied_s
        self.tied_of = tied_of
        self.best_value = best_value
        # labels of several classes differ in what they use of each, and soon are too many
        self.is_mixed = len(self.pool.total) > 1
        self.prices = np.zeros(len(self.pool.total))
        self.paths: list[StagePath] = []
        self.open: list[_Box] = []
        self.unproven = math.inf
        self.given_up = 0
        self._order = count()
        stages = min(space.tables.most_stages, int(self.pool.total.sum()))
        self.most_stages = space.options.num_stages or space.max_stages or stages

    @cached_property
    def least_weight(self) -> float:
        """Return a lower bound of every plan's sum."""
        return self._relax(self.arcs, MetricCaps()).least_weight

    @property
    def best(self) -> StagePath | None:
        """Return the best path found here, if it beats the value known before."""
        return min(self.paths, key=lambda path: path.value, default=None)

    @property
    def bound(self) -> float:
        """Return a lower bound of every plan of this space."""
        boxes = (box.bound for box in self.open)
        return min(self.best_value, self.unproven, *boxes, math.inf)

    def find_fewest_devices(self) -> StagePath | None:
        """Find the plan that uses fewest devices, whatever its value."""
        return self._solve(MetricCaps(quantum=math.inf)).best

    def find_every_count(self) -> list[StagePath]:
        """Find one plan for each total number of replicas that some plan has."""
        self.rules = self.rules._replace(count_replicas=True)
        self._solve(MetricCaps(quantum=math.inf), paths=2**30)
        return self.paths

    def find_first(self) -> StagePath | None:
        """Find any plan, soon: caps on the first metric are tried from the ideal one upwards.

        Tight caps leave few arcs to choose from, so that a search within them is short.
        """
        cap = self._ideal_metric()
        growth = CAP_GROWTH[len(self.arcs.last) > MANY_ARCS]
        for _ in range(FIRST_PLAN_TRIES):
            if self.effort.is_over:
                raise DeadlineExceeded(GAVE_UP)
            found = self._solve(MetricCaps(first=cap, quantum=math.inf), beam=self._beam).best
            if found is not None:
                return found
            cap *= growth
        return self.find_fewest_devices()

    @property
    def _beam(self) -> int:
        """Return the labels of a position that a quick search keeps; 0 for all."""
        return BEAM if self.is_mixed else 0

    def _even_share(self) -> tuple[float, float]:
        """Return all work spread evenly over all devices, and all work on one; per micro-batch.

        In the unit of the first metric, on the slowest class.
        """
        costs, speed = self.space.tables, self.pool.speed
        work, backward = costs.whole_s
        if self.measure != "gpipe":
            work += backward
        slowest = self.space.devices.fastest / float(speed.max())
        power = float((self.pool.total * speed).sum()) * slowest
        return work / power, work / slowest

    def _ideal_metric(self) -> float:
        """Return the first metric if work could be spread evenly over all devices."""
        share, work = self._even_share()
        if self.rules.per_replica:
            return share
        m = self.rules.num_microbatches
        return max(m * share - self.rules.spared * work, m * share * 1e-3)

    def _least_metric(self) -> float:
        """Return a lower bound of every plan's first metric.

        n micro-batches per replica of a stage of time x keep (n - 1) x <= cap, hence it has
        r >= m / n >= m x / (cap + x) replicas, which is concave in x: the whole work as one
        stage needs least, on the slowest class.
        """
        share, work = self._even_share()
        if self.rules.per_replica:
            return share * (1 - 1e-9)
        if self.measure != "1f1b":
            return 0.0
        return max(0.0, (self.rules.num_microbatches * share - work) * (1 - 1e-9))

    def narrow(self, tolerance: float) -> float:
        """Bound the first metric of plans better than the best one known from below.

        Bisection over relaxations (`label_setting.relax`); a failure moves the bound to the next
        value that some stage really has (Pinar and Aykanat, JPDC 2004). O(log(1 / tolerance))
        relaxations of O(arcs); arcs that no such plan has are forgotten first.
        """
        if self.least_weight == math.inf:
            return self.best_value  # there are none
        self._prune(0.0)
        arcs, high = self.arcs, self._most_metric()
        low = min(self._least_metric(), high)
        while high - low > tolerance * self.best_value and not self.effort.is_over:
            middle = low + (high - low) / 2
            caps = MetricCaps(first=middle, weight=self._weight_cap((low, 0.0)))
            relaxed = self._relax(arcs, caps)
            self.effort.searches += 1
            if relaxed.least_weight > caps.weight:
                low = min(max(relaxed.next_metrics[0], middle), high)
            else:
                # Caps only become tighter: arcs outside these stay outside, and so no path within
                # them has a metric that only those arcs have.
                high, arcs = middle, arcs.prune(relaxed.replicas)
        return low

    def lower_metric(self, tolerance: float) -> None:
        """Find plans of ever lower first metric by bisection, whatever their sums.

        Where stages are many, sums hardly differ, and these plans are nearly the best. Labels are
        compared by devices alone, so that a search is quick.
        """
        if self.least_weight == math.inf:
            return
        low = self.narrow(tolerance)
        self._prune(low)
        high = self._most_metric()
        while high - low > tolerance * self.best_value and not self.effort.is_over:
            middle = low + (high - low) / 2
            caps = MetricCaps(middle, weight=self._weight_cap((low, 0.0)), quantum=math.inf)
            best = self._solve(caps, budget=MOST_GIVEN_UP, beam=self._beam).best
            low, high = (middle, high) if best is None else (low, min(middle, best.metrics[0]))

    def _find_near(self, lower: float) -> None:
        """Find a plan with a first metric just above ``lower``, a bound on it.

        It is at most twice as far above as the nearest one that a beam finds.
        """
        distance = max(self.effort.gap, LEAST_TOLERANCE) * self.best_value / 4
        while lower + distance < self._most_metric() and not self.effort.is_over:
            weight = self._weight_cap((lower, 0.0))
            caps = MetricCaps(lower + distance, weight=weight, quantum=math.inf)
            if self._solve(caps, beam=NARROW_BEAM).best is not None:
                return
            distance *= 2

    def _relax(self, arcs: StageArcs, caps: MetricCaps) -> Relaxation:
        """Bound all paths within the caps; the next search begins at the prices found here."""
        relaxed = relax(arcs, self.pool, self.rules, caps, self.prices)
        self.prices = relaxed.prices
        return relaxed

    def _prune(self, lower: float) -> None:
        """Forget the arcs that no plan better than the best has."""
        caps = MetricCaps(first=self._most_metric(), weight=self._weight_cap((lower, 0.0)))
        relaxed = self._relax(self.arcs, caps)
        self.arcs = self.arcs.prune(relaxed.replicas)

    def _most_metric(self) -> float:
        """Return the largest first metric that plans better than the best one known can have."""
        return self._weight_cap(NONE) - self.least_weight

    def run(self, *, max_searches: int = 2_000) -> None:
        """Search until proven to the gap, or out of time."""
        if self.best_value == math.inf and self.find_first() is None:
            return
        if self.least_weight == math.inf:
            return  # nothing here, though elsewhere a plan is known
        # Each step makes the next one cheaper: a better incumbent lowers the caps, lower caps
        # leave fewer arcs, and fewer arcs shorten the searches.
        lower = self.narrow(max(self.effort.gap / 2, LEAST_TOLERANCE))
        self._prune(lower)
        if len(self.arcs.last) > LONG:
            self._find_near(lower)
        limit = self.effort.searches + max_searches
        if self._open_ranges(lower, limit) and self._close_boxes(limit):
            self.open.clear()
            self.unproven = min(self.unproven, self.best_value * (1 - self.effort.gap))

    def _open_ranges(self, lower: float, limit: int) -> bool:
        """Open boxes that cover the first metric from ``lower`` on; False if time ran out.

        Each range is twice as wide as the one before: narrow ones are quick, because few arcs
        keep their caps, and by the time the wide ones come a good plan is known.
        """
        width = (self._most_metric() - lower) / FIRST_RANGE
        width = max(width, self.effort.gap * self.best_value / 4)
        second = math.inf if self.arcs.second_unit.any() else 0.0
        while lower <= self._most_metric():
            if self.effort.is_over or self.effort.searches > limit:
                self.unproven = min(self.unproven, self._bound_from(lower))
                return False
            # asked again after every box: a better incumbent ends the range sooner
            upper = min(lower + width, self._most_metric())
            self._open_box(
                (lower, 0.0), (upper, second), self._bound_from(lower),
                self.least_weight, self.arcs,
            )  # fmt: skip
            if upper >= self._most_metric():
                break
            lower, width = upper, 2 * width
        return True

    def _close_boxes(self, limit: int) -> bool:
        """Branch on the open box of least bound until that is closed; False if it took too long."""
        while self.open and not self._is_closed(self.open[0].bound):
            if self.effort.is_over or self.effort.searches > limit:
                return False
            if self.given_up > MOST_GIVEN_UP // (4 if len(self.arcs.last) > HUGE else 1):
                return False
            self._branch(heapq.heappop(self.open))
        return True

    def _bound_from(self, first: float) -> float:
        """Bound plans with at least this first metric."""
        return self.least_weight + first + self.tied_s

    def _is_closed(self, bound: float) -> bool:
        return bound >= self.best_value * (1 - max(self.effort.gap, ROUNDING))

    def _weight_cap(self, lower: Metrics) -> float:
        """Return the sum above which a plan of the box does not improve enough on the best."""
        if self.best_value == math.inf:
            return math.inf
        gap = self.effort.gap
        wanted = self.best_value * (1 - gap + min(gap / 4, CLOSING))
        return (wanted - sum(lower) - self.tied_s) * (1 + ROUNDING)

    def _open_box(
        self,
        lower: Metrics,
        upper: Metrics,
        known: float,
        weight: float,
        arcs: StageArcs,
        given_up: int = 0,
    ) -> Metrics:
        """Solve a box at its upper corner; return the least metrics beyond that corner.

        A box whose search is given up is kept as it is, to be halved when its turn comes.
        """
        beyond = (math.inf, math.inf)
        solution = None
        if self.is_mixed:
            # A plan from a beam may lower the caps so far that nothing is left to search.
            caps = MetricCaps(*upper, weight=self._weight_cap(lower))
            quick = self._solve(caps, exact=True, arcs=arcs, beam=BEAM)
            solution = quick if quick.complete else None
        caps = MetricCaps(*upper, weight=self._weight_cap(lower))
        if solution is None and self.is_mixed:
            relaxed = self._relax(arcs, caps)  # for its prices
            beyond = relaxed.next_metrics
            if relaxed.least_weight > caps.weight:
                return beyond
        widest = _widest(lower, upper)[1]
        can_split = widest > max(self.effort.gap, LEAST_SPLIT) * self.best_value / 16
        budget = self._split_budget() << given_up if can_split else None
        if solution is None:
            solution = self._solve(caps, exact=True, budget=budget, arcs=arcs)
            self.given_up += 0 if solution.complete or budget is None else budget
        if solution.replicas is not None:
            arcs = arcs.prune(solution.replicas)
        if solution.best is not None or (can_split and not solution.complete):
            weight = max(weight, solution.bound_weight)
            bound = max(weight + sum(lower) + self.tied_s, known)
            if not self._is_closed(bound):
                attained = solution.best.metrics if solution.best else upper
                self._push(
                    _Box(bound, 0, lower, upper, weight, attained, arcs,
                         is_solved=solution.best is not None,
                         given_up=given_up + (not solution.complete))
                )  # fmt: skip
        elif not solution.complete:
            self.unproven = min(self.unproven, known)
        if not solution.complete:
            return NONE  # refused stages were not all seen: the upper half starts at the middle
        least = [min(pair) for pair in zip(beyond, solution.next_metrics, strict=True)]
        return least[0], least[1]

    def _push(self, box: _Box) -> None:
        heapq.heappush(self.open, replace(box, order=next(self._order)))

    def _branch(self, box: _Box) -> None:
        """Halve a box at the metric whose largest value is least certain."""
        attained = box.attained
        k, span = _widest(box.lower, attained)
        if span <= ROUNDING * attained[k]:
            self.unproven = min(self.unproven, box.bound)
            return
        middle = box.lower[k] + span / 2
        if middle >= attained[k]:  # rounded up: the two are neighbours
            middle = box.lower[k]
        beyond = self._open_box(
            box.lower, _with(box.upper, k, middle), box.bound, box.weight, box.arcs, box.given_up
        )
        # no stage has a metric between the middle and the next value: skip what is empty
        start = max(beyond[k], math.nextafter(middle, math.inf))
        lower = _with(box.lower, k, min(start, attained[k]))
        bound = max(box.bound, box.weight + sum(lower) + self.tied_s)
        if self._is_closed(bound):
            return
        if box.is_solved:  # the same search bounds the upper half, whose corner is the same
            self._push(replace(box, bound=bound, lower=lower))
        else:
            self._open_box(lower, box.upper, bound, box.weight, box.arcs, box.given_up)

    def _split_budget(self) -> int:
        return max(SPLIT_LABELS, SPLIT_PER_ARC * len(self.arcs.last))

    def _time_budget(self) -> int:
        """Return the candidate labels the next search may look at before the deadline."""
        if self.effort.deadline == math.inf:
            return MAX_LABELS
        left_s = max(self.effort.deadline - time.monotonic(), 0.05)
        return min(MAX_LABELS, int(left_s * LABELS_PER_S))

    def _solve(
        self,
        caps: MetricCaps,
        *,
        exact: bool = False,
        paths: int = 4,
        budget: int | None = None,
        arcs: StageArcs | None = None,
        beam: int = 0,
    ) -> _Solution:
        """Run one label search; repeat it with coarser weights if it grows too large."""
        quantum = caps.quantum
        for _ in range(5):
            outcome = search(
                arcs or self.arcs, self.pool, self.rules, caps._replace(quantum=quantum),
                budget=min(budget or MAX_LABELS, self._time_budget()), paths=paths, beam=beam,
                prices=self.prices,
            )  # fmt: skip
            self.effort.searches += 1
            self.effort.labels += outcome.labels
            if outcome.complete or beam:
                break
            if budget or quantum == math.inf or self.best_value == math.inf or self.effort.is_over:
                break
            # stages lose at most a quantum each: a sixteenth of the gap in all
            finest = max(self.effort.gap, 1e-5) * self.best_value / (16 * self.most_stages)
            quantum = max(4 * quantum, finest)
        if not outcome.complete and self.best_value == math.inf and not beam:
            raise DeadlineExceeded(GAVE_UP)
        found = [self._evaluate(path) for path in outcome.paths()]
        for path in found:
            self.paths.append(path)
            if path.value < self.best_value:
                self.best_value = path.value
        lost = quantum * self.most_stages if quantum else 0.0
        weight = outcome.best.total - lost if outcome.best and exact else outcome.least_weight
        best = found[0] if found else None
        return _Solution(best, weight, outcome.next_metrics, outcome.complete, outcome.replicas)

    def _evaluate(self, path: ArcPath) -> StagePath:
        """Return a path with its largest metrics and value."""
        metrics = largest_metrics(path.arcs, self.arcs, self.rules, self.space.devices)
        tied_s = self.tied_of(path.arcs) if self.tied_of else self.tied_s
        return StagePath(path.arcs, path.total, metrics, path.total + sum(metrics) + tied_s)


def _widest(lower: Metrics, upper: Metrics) -> tuple[int, float]:
    """Return the metric whose range is widest, and its width."""
    spans = [high - low for low, high in zip(lower, upper, strict=True)]
    k = spans.index(max(spans))
    return k, spans[k]


def _with(metrics: Metrics, k: int, value: float) -> Metrics:
    changed = list(metrics)
    changed[k] = value
    return changed[0], changed[1]


def cut_level(arc: StageArc, behind: StageArc, devices: Devices) -> int:
    """Return the link level between two neighbouring stages."""
    one, other = arc.device_class, behind.device_class
    if one != other:
        return devices.level_between(one, other)
    return devices.classes[one].level_of(arc.end - 1, behind.end - behind.replicas)


def largest_metrics(
    path: tuple[StageArc, ...], arcs: StageArcs, rules: SearchRules, devices: Devices
) -> Metrics:
    """Return the largest value of each metric over a path's stages."""
    largest = [0.0, 0.0]
    for index, arc in enumerate(path):
        level = cut_level(arc, path[index + 1], devices) if index + 1 < len(path) else 0
        for k, value in enumerate(_metrics(arc, level, arcs, rules)):
            largest[k] = max(largest[k], value)
    return largest[0], largest[1]


def _metrics(stage: StageArc, level: int, arcs: StageArcs, rules: SearchRules) -> Metrics:
    """Return the metrics of one stage with its cut on a link level."""
    arc = arcs.find(stage.first, stage.last, stage.device_class, recompute=stage.recompute)
    unit = float(arcs.first_unit[arc] + arcs.metric_link[level, stage.last])
    share = -(-rules.num_microbatches // stage.replicas)
    if rules.per_replica:
        first = unit / stage.replicas
    else:
        first = float(arcs.offset[stage.first]) + (share - rules.spared) * unit
    return first, (share - rules.spared) * float(arcs.second_unit[arc])
