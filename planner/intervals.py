"""Shortest and narrowest paths over intervals of layers, for a fixed number of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Level:
    """What each interval costs when it is stage s; every array has one entry an interval.

    Attributes:
        weight: What a split adds up.
        metrics: One array for each quantity whose largest value over the stages counts.
        allowed: Whether the interval may be stage s.
    """

    weight: Floats
    metrics: tuple[Floats, ...]
    allowed: Mask


@dataclass(frozen=True)
class Path:
    """A split into stages: S + 1 positions from 0 to L, and its value."""

    cuts: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class IntervalProgram:
    """All ways to cover [0, L) by S intervals, one at each level.

    Attributes:
        num_layers: L.
        first: Where each interval begins.
        last: Where it ends (exclusive); intervals are sorted by ``last``, then ``first``.
        levels: S levels, the front stage first.
    """

    num_layers: int
    first: Indices
    last: Indices
    levels: tuple[Level, ...]

    def smallest_sum(self, at_most: tuple[float, ...]) -> Path | None:
        """The path of least total weight whose every metric stays within ``at_most``."""

        def step(level: Level, reached: Floats) -> Floats:
            usable = level.allowed
            for metric, limit in zip(level.metrics, at_most, strict=True):
                if limit < np.inf:
                    usable = usable & (metric <= limit)
            return np.where(usable, reached + level.weight, np.inf)

        return self._best(step, 0.0)

    def smallest_largest(self, metric: int) -> Path | None:
        """The path whose largest value of one metric is least."""

        def step(level: Level, reached: Floats) -> Floats:
            return np.where(level.allowed, np.maximum(reached, level.metrics[metric]), np.inf)

        return self._best(step, -np.inf)

    def _best(self, step: Callable[[Level, Floats], Floats], base: float) -> Path | None:
        """Dynamic program over levels.

        State: best[s][j], least value of s stages that cover layers [0, j).
        Transition: best[s+1][j] = min over intervals [i, j) of step(best[s][i], [i, j)).
        Base: best[0][0] = base. O(S x number of intervals); ties go to the smallest i.
        """
        if not len(self.first):
            return None
        starts = np.flatnonzero(np.diff(self.last, prepend=-1))
        ends = self.last[starts]
        row = np.full(self.num_layers + 1, np.inf)
        row[0] = base
        values = []
        for level in self.levels:
            values.append(step(level, row[self.first]))
            row = np.full(self.num_layers + 1, np.inf)
            row[ends] = np.minimum.reduceat(values[-1], starts)
        value = float(row[self.num_layers])
        if value == np.inf:
            return None
        cuts = [self.num_layers]
        for reached in reversed(values):
            low, high = np.searchsorted(self.last, [cuts[-1], cuts[-1] + 1])
            cuts.append(int(self.first[low + int(np.argmin(reached[low:high]))]))
        return Path(tuple(reversed(cuts)), value)

    def keep(self, mask: Mask) -> IntervalProgram:
        """The same program with only some of the intervals; shared arrays stay shared."""
        kept: dict[int, Floats] = {}

        def cut(column: Floats) -> Floats:
            if id(column) not in kept:
                kept[id(column)] = column[mask]
            return kept[id(column)]

        levels = tuple(
            Level(cut(level.weight), tuple(map(cut, level.metrics)), level.allowed[mask])
            for level in self.levels
        )
        return IntervalProgram(self.num_layers, self.first[mask], self.last[mask], levels)
