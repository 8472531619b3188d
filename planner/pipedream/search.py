"""Search for PipeDream's best split: exact in tables, otherwise between two bounds.

Where there are too many states for tables, three facts keep the search small.

1. A cut state I is paid for by a stage on r <= M - 1 machines: 2 a(I) / (B r). If some split is
   known to cost U, only states with a(I) <= U B (M - 1) / 2 can be cut at in a better one.
2. A level's optimum for a range is at least its T divided by all machines in it: a stage costs at
   least T_t / r_t, and the largest of ratios is at least the ratio of the sums.
3. On the lowest level, with phi_r = T + 4 (r - 1) W / (B r), a stage (K, J) on r machines costs at
   most u only if phi_r(J) - phi_r(K) <= r u, a(K) <= B r u / 2 and, unless J is everything,
   a(J) <= B r u / 2; and if J holds K then phi_r(K) <= phi_r(J). Which states are reached with
   exactly m machines under these conditions alone is found in order of phi_r, for all states at
   once and with no pair ever formed. It forgets whether J holds K, so it reaches every
   state that a real pipeline reaches: if it does not reach the end, nothing costs at most u, and u
   is a lower bound. If it does, walking back over real subsets gives a split of cost at most u,
   or, when the walk has tried everything, again the proof that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .dynamic_program import (
    Floats,
    LevelTable,
    MachineLevel,
    PipelineTables,
    StageSpan,
    States,
    first_stage_s,
)

Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]

TABLE_ENTRIES = 2e9
"""Table entries compared that still count as quick: about two seconds."""

TABLE_BYTES = 1.5e8
"""A level's costs take eight bytes per pair of states and number of replicas."""

COARSE_STATES = 64
FINE_STATES = 256
"""How many states a first answer is made from, and one that has to be the last."""

MAX_POINTS = 400
"""Cut states of a higher level among which the search is exact."""

STRIDE_GROWTH = 8.0
"""How much further below the best value each try goes, until one fails."""

MAX_WALK = 5_000
"""Points the walk back looks at before it gives up."""

ROUNDING = 1e-12
"""Slack when comparing sums of times, relative; added on the safe side of a bound."""


@dataclass(frozen=True)
class SplitStage:
    """A stage between two states and the pipeline inside it."""

    first: int
    last: int
    replicas: int
    inner: tuple[SplitStage, ...] = ()


@dataclass(frozen=True)
class SplitBounds:
    """A pipeline with its cost, and a lower bound of every pipeline's cost."""

    value_s: float
    lower_bound_s: float
    pieces: tuple[SplitStage, ...]


def best_split(states: States, levels: Sequence[MachineLevel], tolerance: float) -> SplitBounds:
    """Find the best pipeline of the whole graph on all levels.

    Levels go from the lowest to the highest; where tables do not fit, the search stops at this
    relative gap.
    """
    if len(states) <= COARSE_STATES:
        return _by_tables(states, levels, np.arange(states.last, dtype=np.intp))
    upper = _coarse(states, levels, 0, states.last)
    bases = _cut_points(states, levels, upper.value_s, 0, states.last)
    if _fits(len(states), len(bases) + 1, levels):
        return _by_tables(states, levels, np.append(0, bases), upper.value_s)
    return _Search(states, levels, tolerance).between(len(levels) - 1, 0, states.last)


def _fits(num_states: int, num_bases: int, levels: Sequence[MachineLevel]) -> bool:
    """Return True if the tables are small enough to be filled."""
    rows = [num_states] * max(0, len(levels) - 2) + [num_bases] * (len(levels) > 1) + [1]
    entries = sum(
        count * num_states**2 / 4 * level.machines**2 / 2
        for count, level in zip(rows, levels, strict=True)
    )
    size_bytes = 8 * num_states**2 * max(level.machines for level in levels)
    return size_bytes <= TABLE_BYTES and entries <= TABLE_ENTRIES


def _by_tables(
    states: States, levels: Sequence[MachineLevel], bases: Indices, upper_s: float = math.inf
) -> SplitBounds:
    tables = PipelineTables(states, levels, bases, upper_s)
    value_s = tables.value_s(0, states.last)
    return SplitBounds(value_s, value_s, _pieces(tables, len(levels) - 1, 0, states.last))


def _pieces(tables: PipelineTables, depth: int, first: int, last: int) -> tuple[SplitStage, ...]:
    return tuple(
        SplitStage(
            step.first,
            step.last,
            step.replicas,
            _pieces(tables, depth - 1, step.first, step.last) if depth else (),
        )
        for step in tables.steps(depth, first, last)
    )


def _coarse(
    states: States,
    levels: Sequence[MachineLevel],
    first: int,
    last: int,
    num_slices: int = COARSE_STATES,
) -> SplitBounds:
    """Find a pipeline over a few of the states between two states, without a lower bound.

    Equal slices of the work between them each offer the state that is cheapest to cut at.
    """
    between = np.flatnonzero(states.above(first) & (states.below(last)))
    times_s = states.times_s[between]
    span_s = states.times_s[last] - states.times_s[first]
    slices = np.zeros(len(between), dtype=np.intp)
    if span_s > 0:
        slices = ((times_s - states.times_s[first]) / span_s * num_slices).astype(np.intp)
    order = np.lexsort((states.boundary_bytes[between], slices))
    _, leading = np.unique(slices[order], return_index=True)
    chosen = np.unique(np.append(between[order[leading]], [first, last, states.last]))
    tables = PipelineTables(states.take(chosen), levels, np.arange(len(chosen) - 1, dtype=np.intp))
    start, end = (int(np.searchsorted(chosen, state)) for state in (first, last))
    pieces = _renumber(_pieces(tables, len(levels) - 1, start, end), chosen)
    return SplitBounds(tables.value_s(start, end), 0.0, pieces)


def _renumber(pieces: tuple[SplitStage, ...], chosen: Indices) -> tuple[SplitStage, ...]:
    return tuple(
        SplitStage(
            int(chosen[piece.first]),
            int(chosen[piece.last]),
            piece.replicas,
            _renumber(piece.inner, chosen),
        )
        for piece in pieces
    )


def _cut_points(
    states: States, levels: Sequence[MachineLevel], upper_s: float, first: int, last: int
) -> Indices:
    """Return the states at which a top-level pipeline of cost ``upper_s`` may be cut.

    By facts 1 and 2 of this file's head.
    """
    level = levels[-1]
    most = math.prod(lower.machines for lower in levels[:-1]) * (level.machines - 1)
    limit_s = upper_s * (1 + ROUNDING)
    mask = states.above(first) & states.below(last)
    mask &= 2 * states.boundary_bytes <= limit_s * level.bandwidth_bytes_per_s * (
        level.machines - 1
    )
    mask &= states.times_s - states.times_s[first] <= limit_s * most
    mask &= states.times_s[last] - states.times_s <= limit_s * most
    return np.flatnonzero(mask)


@dataclass
class _Search:
    """Cached search for the best pipeline of a level between two states."""

    states: States
    levels: Sequence[MachineLevel]
    tolerance: float
    known: dict[tuple[int, int, int], SplitBounds] = field(default_factory=dict)

    def between(self, depth: int, first: int, last: int) -> SplitBounds:
        """Return the best pipeline of one level from one state to another."""
        key = (depth, first, last)
        if key not in self.known:
            self.known[key] = self._between(depth, first, last)
        return self.known[key]

    def _between(self, depth: int, first: int, last: int) -> SplitBounds:
        levels = self.levels[: depth + 1]
        if depth:
            best = _coarse(self.states, levels, first, last)
            points = _cut_points(self.states, levels, best.value_s, first, last)
            if len(points) <= MAX_POINTS:
                return self._over_points(depth, np.array([first, *points, last]), best)
        best = _coarse(self.states, levels, first, last, FINE_STATES)
        points = _cut_points(self.states, levels, best.value_s, first, last)
        below = math.prod(level.machines for level in levels[:-1])
        reach = _Reach(self.states, levels[-1], first, last, points, below, best.value_s)

        def price(steps: Sequence[StageSpan]) -> SplitBounds:
            if not depth:
                plain = [SplitStage(step.first, step.last, step.replicas) for step in steps]
                return SplitBounds(reach.cost_s(steps), 0.0, tuple(plain))
            inside = [self.between(depth - 1, step.first, step.last) for step in steps]
            return SplitBounds(
                reach.cost_s(steps, [inner.value_s for inner in inside]),
                0.0,
                tuple(
                    SplitStage(step.first, step.last, step.replicas, inner.pieces)
                    for step, inner in zip(steps, inside, strict=True)
                ),
            )

        return _narrow(reach, best, self.tolerance, price)

    def _over_points(self, depth: int, points: Indices, best: SplitBounds) -> SplitBounds:
        """Search over a few cut states, replacing fact 2's bound by solved ranges as needed.

        With every range at a lower bound the recurrence gives a lower bound; once all ranges of
        the pipeline it prefers are solved, nothing is left to learn.
        """
        states, level = self.states, self.levels[depth]
        end = len(points) - 1
        chosen = np.append(points, states.last) if points[-1] != states.last else points
        few = states.take(chosen)
        below = math.prod(lower.machines for lower in self.levels[:depth])
        work_s = np.where(few.nested(), (few.times_s - few.times_s[:, None]) / below, np.inf)
        # `nested` is of whole states, also where the first of them is not empty.
        solved: dict[tuple[int, int], SplitBounds] = {}
        while True:
            table = LevelTable(level, few, work_s)
            lower_s = float(table.row(0)[level.machines, end])
            steps = table.steps(0, end)
            fresh = [step for step in steps if (step.first, step.last) not in solved]
            for step in fresh:
                inner = self.between(depth - 1, int(chosen[step.first]), int(chosen[step.last]))
                solved[step.first, step.last] = inner
                work_s[step.first, step.last] = inner.lower_bound_s
            value_s = _pipeline_s(level, few, steps, solved)
            if value_s < best.value_s:
                best = SplitBounds(value_s, 0.0, tuple(
                    SplitStage(int(chosen[step.first]), int(chosen[step.last]), step.replicas,
                          solved[step.first, step.last].pieces)
                    for step in steps
                ))  # fmt: skip
            if not fresh or lower_s >= best.value_s * (1 - ROUNDING):
                return SplitBounds(best.value_s, min(lower_s, best.value_s), best.pieces)


def _pipeline_s(
    level: MachineLevel,
    states: States,
    steps: Sequence[StageSpan],
    solved: dict[tuple[int, int], SplitBounds],
) -> float:
    """Return the cost of a pipeline whose ranges are solved."""
    work_s = np.full((len(states), len(states)), np.inf)
    for step in steps:
        work_s[step.first, step.last] = solved[step.first, step.last].value_s
    table = LevelTable(level, states, work_s)
    return float(table.cost_s(steps))


class _Reach:
    """The states reachable with m machines at cost at most u (fact 3 above).

    Sums never decrease from a state to one that holds it, nor does phi. A
    pipeline begins at ``first``, ends at ``last`` and may be cut at ``points`` between them. T is
    divided by ``below``, the machines in one machine of this level, for a lower bound. No cost
    above ``upper_s`` is asked for.
    """

    def __init__(
        self,
        states: States,
        level: MachineLevel,
        first: int,
        last: int,
        points: Indices,
        below: int,
        upper_s: float,
    ) -> None:
        self.level = level
        self._states = states
        self._points = np.append(points, last)
        self._first = first
        base_s, base_bytes = states.times_s[first], states.parameter_bytes[first]
        self._work_s = (states.times_s[self._points] - base_s) / below
        self._parameter_bytes = states.parameter_bytes[self._points] - base_bytes
        self._transfer_s = 2 * states.boundary_bytes[self._points] / level.bandwidth_bytes_per_s
        self._out_s = self._transfer_s.copy()
        if last == states.last:
            self._out_s[-1] = 0.0
        self._phi_s = [
            self._work_s
            + 4 * (replicas - 1) * self._parameter_bytes / (level.bandwidth_bytes_per_s * replicas)
            for replicas in range(1, level.machines)
        ]
        self._orders = []
        for replicas, phi_s in enumerate(self._phi_s, start=1):
            near = np.flatnonzero(self._out_s <= self.slack_s(upper_s) * replicas)
            self._orders.append(near[np.argsort(phi_s[near], kind="stable")])
        self.least_s = float(self._work_s[-1]) / level.machines

    def decide(self, limit_s: float) -> tuple[list[StageSpan] | None, bool]:
        """Search for a pipeline of cost at most ``limit_s``.

        Returns the pipeline if one was found, and whether one may exist.
        """
        reached = self._reached(limit_s)
        end = len(self._points) - 1
        if not reached[self.level.machines][end]:
            return None, False
        walk = _Walk(self, reached, self.slack_s(limit_s))
        steps = walk.back(end, self.level.machines)
        return steps, steps is not None or walk.left <= 0

    def _reached(self, limit_s: float) -> list[Mask]:
        machines, end = self.level.machines, len(self._points) - 1
        slack_s = self.slack_s(limit_s)
        rest_s = self._work_s[-1] - self._work_s
        usable = [
            (self._work_s <= slack_s * count)
            & (rest_s <= slack_s * (machines - count))
            & (self._transfer_s <= slack_s * (machines - count))
            for count in range(machines + 1)
        ]
        for count in range(machines + 1):
            usable[count][end] = count == machines
        usable[machines][:end] = False
        near = [self._by_phi(replicas, slack_s) for replicas in range(1, machines)]
        reached = [np.zeros(end + 1, dtype=np.bool_)]
        for count in range(1, machines + 1):
            alone_s = first_stage_s(self.level, self._work_s, self._parameter_bytes, count)
            mask = (alone_s <= slack_s) & usable[count]
            for replicas in range(1, count):
                points, phi_s = near[replicas - 1]
                source = reached[count - replicas][points]
                source &= self._transfer_s[points] <= slack_s * replicas
                if source.any():
                    # Points are in order of phi, so the last source in front of each is
                    # the nearest: a running maximum replaces comparing all pairs.
                    latest_s = np.maximum.accumulate(np.where(source, phi_s, -np.inf))
                    hit = phi_s[1:] - latest_s[:-1] <= slack_s * replicas
                    mask[points[1:][hit & usable[count][points[1:]]]] = True
            reached.append(mask)
        return reached

    def _by_phi(self, replicas: int, slack_s: float) -> tuple[Indices, Floats]:
        """Return the points where a stage on ``replicas`` machines may end, by phi, and phi.

        Of two with the same phi the smaller state comes first. So the latest source in front of
        a point is the nearest that it may hold, and no other need be looked at.
        """
        order = self._orders[replicas - 1]
        points = order[self._out_s[order] <= slack_s * replicas]
        return points, self._phi_s[replicas - 1][points]

    def slack_s(self, limit_s: float) -> float:
        """Return the limit plus the rounding error of the sums it is compared with."""
        return limit_s * (1 + ROUNDING) + ROUNDING * float(self._work_s[-1])

    def step(self, begin: int | None, end: int, replicas: int) -> StageSpan:
        """Return the stage between two points; None is the state the pipeline begins at."""
        first = self._first if begin is None else int(self._points[begin])
        return StageSpan(first, int(self._points[end]), replicas)

    def alone_s(self, end: int, machines: int) -> float:
        """Return the cost of a single stage from the beginning to a point."""
        work_s, weights = self._work_s[end : end + 1], self._parameter_bytes[end : end + 1]
        return float(first_stage_s(self.level, work_s, weights, machines)[0])

    def sources(self, reached: Mask, end: int, replicas: int, slack_s: float) -> Indices:
        """Return the points where a stage on ``replicas`` machines may begin to end at ``end``.

        Furthest first, so that earlier stages are short.
        """
        if self._out_s[end] > slack_s * replicas:
            return np.empty(0, dtype=np.intp)
        phi_s = self._phi_s[replicas - 1]
        near = reached & (self._transfer_s <= slack_s * replicas)
        near &= phi_s[end] - phi_s <= slack_s * replicas
        near &= phi_s <= phi_s[end]
        candidates = np.flatnonzero(near)
        rows = self._states.rows
        inside = ~(rows[self._points[candidates]] & ~rows[self._points[end]]).any(axis=1)
        candidates = candidates[inside & (candidates != end)]
        order: Indices = np.argsort(phi_s[candidates], kind="stable")
        return np.asarray(candidates[order], dtype=np.intp)

    def cost_s(self, steps: Sequence[StageSpan], works_s: Sequence[float] | None = None) -> float:
        """Return the cost of a pipeline; ``works_s`` are stage times from the level below."""
        states, level = self._states, self.level
        value_s = 0.0
        for place, step in enumerate(steps):
            work_s = states.times_s[step.last] - states.times_s[step.first]
            if works_s is not None:
                work_s = works_s[place]
            weights = states.parameter_bytes[step.last] - states.parameter_bytes[step.first]
            rate = level.bandwidth_bytes_per_s * step.replicas
            sync_s = 4 * (step.replicas - 1) * weights / rate
            if step.first == self._first:
                sync_s /= level.machines_below
            else:
                value_s = max(value_s, 2 * states.boundary_bytes[step.first] / rate)
                if step.last != states.last:
                    value_s = max(value_s, 2 * states.boundary_bytes[step.last] / rate)
            value_s = max(value_s, (work_s + sync_s) / step.replicas)
        return float(value_s)


@dataclass
class _Walk:
    """A depth-first walk from the end that visits each (point, machines) pair once."""

    reach: _Reach
    reached: list[Mask]
    slack_s: float
    left: int = MAX_WALK
    failed: set[tuple[int, int]] = field(default_factory=set)

    def back(self, end: int, machines: int) -> list[StageSpan] | None:
        """Return stages that lead to a point on exactly this many machines, if any."""
        if (end, machines) in self.failed or self.left <= 0:
            return None
        self.left -= 1
        if self.reach.alone_s(end, machines) <= self.slack_s:
            return [self.reach.step(None, end, machines)]
        for replicas in range(1, machines):
            before = self.reached[machines - replicas]
            for begin in self.reach.sources(before, end, replicas, self.slack_s):
                steps = self.back(int(begin), machines - replicas)
                if steps is not None:
                    return [*steps, self.reach.step(int(begin), end, replicas)]
        self.failed.add((end, machines))
        return None


def _narrow(
    reach: _Reach,
    best: SplitBounds,
    tolerance: float,
    price: Callable[[Sequence[StageSpan]], SplitBounds],
) -> SplitBounds:
    """Close the gap between lower bound and value to within the tolerance.

    The first try is just below the best pipeline known, which is likely to be good; the next ones
    are further and further below until one fails, then the distance is halved. On a higher level
    a pipeline found may cost more than the limit it was found with, as fact 2 is only a bound;
    then the two ends do not meet.
    """
    lower_s, open_s = reach.least_s, best.value_s
    stride = tolerance
    while lower_s < open_s * (1 - tolerance):
        limit_s = max(open_s * (1 - stride), (lower_s + open_s) / 2)
        steps, may_exist = reach.decide(limit_s)
        if steps is not None:
            found = price(steps)
            best = min(found, best, key=lambda bracket: bracket.value_s)
        # A walk that gave up proves nothing either way: only an exhausted one raises the bound.
        if may_exist:
            open_s = min(limit_s, best.value_s)
            stride *= STRIDE_GROWTH
        else:
            lower_s = limit_s
    return SplitBounds(best.value_s, min(lower_s, best.value_s), best.pieces)
