"""PipeDream's search space, the states of a profile graph, and the dynamic program over them.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
SOSP 2019, and the optimizer published with it.

Legend: state 0 is empty, the last is everything. On one level M machines share links of
B bytes/s; a range [i, j] is what state j holds beyond state i, with C[i, j] seconds of work and
W[i, j] parameter bytes; a[i] are the boundary bytes of state i.

State F[m][j]: the least largest cost of stages from state i to state j on exactly m machines.
Base case: one stage, (C[i, j] + 4 (m - 1) W[i, j] / (B m) / L) / m.
Transition: F[m][j] = min over k, r of max(F[m - r][k], stage(k, j, r)) with
    stage(k, j, r) = max((C[k, j] + 4 (r - 1) W[k, j] / (B r)) / r, 2 a[k] / (B r), 2 a[j] / (B r))
    where the last term is left out if state j is everything.
O(n^2 M^2) time for one i, O(n^3 M^2) for all; O(n^2 M) memory. Between levels F[M] becomes C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ..dag.downsets import Rows, as_rows, membership

Floats = NDArray[np.float64]


def check_costs(name: str, costs: Sequence[float], count: int) -> None:
    """Raise if costs have the wrong length or a negative or non-finite entry."""
    if len(costs) != count:
        raise InvalidInput(f"{name} has {len(costs)} entries, expected {count}", field=f"/{name}")
    for position, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise InvalidInput(
                f"{name}[{position}] is {cost}; a cost is finite and not negative",
                field=f"/{name}/{position}",
            )


@dataclass(frozen=True)
class States:
    """States in order of size, behind the empty set at index 0; the last is everything placed.

    Attributes:
        times_s: Forward and backward of the nodes in each state.
        parameter_bytes: Weights of the nodes in each state.
        boundary_bytes: What PipeDream charges for a cut behind each state.
        rows: The nodes in each state.
        num_nodes: Bits in use in a row.
    """

    times_s: Floats
    parameter_bytes: Floats
    boundary_bytes: Floats
    rows: Rows
    num_nodes: int

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def last(self) -> int:
        """Return the index of the largest state."""
        return len(self) - 1

    def above(self, state: int) -> NDArray[np.bool_]:
        """Return a mask of the proper supersets of a state."""
        held = np.ones(len(self), dtype=np.bool_)
        for word in np.flatnonzero(self.rows[state]):
            held &= self.rows[state, word] & ~self._columns[word] == 0
        held[state] = False
        return held

    def below(self, state: int) -> NDArray[np.bool_]:
        """Return a mask of the proper subsets of a state."""
        held = np.ones(len(self), dtype=np.bool_)
        for word in range(self.rows.shape[1]):
            held &= self._columns[word] & ~self.rows[state, word] == 0
        held[state] = False
        return held

    def nested(self) -> NDArray[np.bool_]:
        """Return a mask [i, j] of states i that are proper subsets of j, in O(states^2) memory."""
        # float32, as numpy multiplies integer matrices without BLAS; counts stay exact to 2**24.
        held = membership(self.rows, self.num_nodes).astype(np.float32)
        result = np.asarray(held @ (1 - held).T == 0)
        np.fill_diagonal(result, False)
        return result

    def take(self, indices: NDArray[np.intp]) -> States:
        """Return some of the states; ``indices`` ascend and include first and last."""
        return States(
            self.times_s[indices],
            self.parameter_bytes[indices],
            self.boundary_bytes[indices],
            self.rows[indices],
            self.num_nodes,
        )

    @cached_property
    def _columns(self) -> Rows:
        """Return the rows transposed, [words, states]: one word of all states is contiguous."""
        return np.ascontiguousarray(self.rows.T)


def chain_states(
    times_s: Sequence[float], parameter_bytes: Sequence[float], boundary_bytes: Sequence[float]
) -> States:
    """Return the states of layers in a row; a cut after layer i sends ``boundary_bytes[i]``."""
    count = len(times_s)
    if not count:
        raise InvalidInput("there are no layers to plan", field="/times_s")
    check_costs("times_s", times_s, count)
    check_costs("parameter_bytes", parameter_bytes, count)
    check_costs("boundary_bytes", boundary_bytes, count - 1)
    return States(
        np.array([0.0, *accumulate(map(float, times_s))]),
        np.array([0.0, *accumulate(map(float, parameter_bytes))]),
        np.array([0.0, *boundary_bytes, 0.0]),
        as_rows([(1 << size) - 1 for size in range(count + 1)], count),
        count,
    )


@dataclass(frozen=True)
class MachineLevel:
    """A level of the machine hierarchy.

    Attributes:
        machines: How many it joins; every one is used.
        bandwidth_bytes_per_s: Of the links between them.
        machines_below: L of the first stage: machines of the level below, 1 at the lowest.
    """

    machines: int
    bandwidth_bytes_per_s: float
    machines_below: int = 1


@dataclass(frozen=True)
class StageSpan:
    """One stage of one level: from state ``first`` to state ``last`` on ``replicas`` machines."""

    first: int
    last: int
    replicas: int


def first_stage_s(
    level: MachineLevel, work_s: Floats, parameter_bytes: Floats, replicas: int
) -> Floats:
    """Return the cost of the first stage of a level, elementwise over arrays of one shape."""
    sync_s = 4 * (replicas - 1) * parameter_bytes / (level.bandwidth_bytes_per_s * replicas)
    return np.asarray((work_s + sync_s / level.machines_below) / replicas)


@dataclass(frozen=True)
class PipelineBound:
    """Bounds that restrict the states on a best pipeline to the last state.

    Attributes:
        upper_s: It costs at most this.
        done_s: For each state, what it costs at least times the machines it gets.
        rest_s: For each state, a lower bound of the cost of the work it lacks, times machines.
        machines: How many there are for both.
    """

    upper_s: float
    done_s: Floats
    rest_s: Floats
    machines: int

    def span(self, begin: int, machines: int, best_s: Floats | None = None) -> slice:
        """Return the range of states from ``begin`` on that may be on the pipeline."""
        may = self.done_s[begin:] <= self.upper_s * machines
        may &= self.rest_s[begin:] <= self.upper_s * (self.machines - machines)
        if best_s is not None:
            may &= best_s[begin:] <= self.upper_s
        found = np.flatnonzero(may)
        return slice(begin + int(found[0]), begin + int(found[-1]) + 1) if len(found) else slice(0)


class LevelTable:
    """The stage costs of one level and the dynamic program over them.

    ``work_s`` is C, [n, n]: infinite where state j does not hold state i, or is of no interest.
    """

    def __init__(self, level: MachineLevel, states: States, work_s: Floats) -> None:
        self._level = level
        self._states = states
        self.work_s = work_s
        parameters = states.parameter_bytes
        self._parameter_bytes = parameters[None, :] - parameters[:, None]
        transfer_s = 2 * states.boundary_bytes / level.bandwidth_bytes_per_s
        out_s = np.append(transfer_s[:-1], 0.0)
        self._later_s = [np.empty((0, 0))]
        for replicas in range(1, level.machines):
            sync = 4 * (replicas - 1) / (level.bandwidth_bytes_per_s * replicas)
            cost_s = np.maximum(work_s + sync * self._parameter_bytes, transfer_s[:, None])
            np.maximum(cost_s, out_s[None, :], out=cost_s)
            cost_s /= replicas
            self._later_s.append(cost_s)

    def row(self, first: int, bound: PipelineBound | None = None) -> Floats:
        """Return F from one state, [machines + 1, n]; infinite where no pipeline exists.

        With a bound only entries on the way to the last state for at most so much are right;
        others may be too large.
        """
        machines = self._level.machines
        best_s = np.full((machines + 1, len(self._states)), np.inf)
        begin = first + 1
        spans = [slice(begin, None)] * (machines + 1)
        for count in range(1, machines + 1):
            best_s[count] = first_stage_s(
                self._level, self.work_s[first], self._parameter_bytes[first], count
            )
            if bound is not None:
                spans[count] = bound.span(begin, count)
            into = spans[count]
            for replicas in range(1, count):
                span = spans[count - replicas]
                before_s = best_s[count - replicas, span, None]
                reached_s = np.maximum(before_s, self._later_s[replicas][span, into])
                np.minimum(
                    best_s[count, into],
                    reached_s.min(axis=0, initial=np.inf),
                    out=best_s[count, into],
                )
            if bound is not None:
                spans[count] = bound.span(begin, count, best_s[count])
        return best_s

    def cost_s(self, steps: Sequence[StageSpan]) -> float:
        """Return the cost of a pipeline with these stages."""
        begin, later = steps[0], steps[1:]
        alone_s = first_stage_s(
            self._level,
            self.work_s[begin.first],
            self._parameter_bytes[begin.first],
            begin.replicas,
        )
        costs_s = [self._later_s[step.replicas][step.first, step.last] for step in later]
        return float(max([alone_s[begin.last], *costs_s]))

    def steps(self, first: int, last: int, bound: PipelineBound | None = None) -> list[StageSpan]:
        """Return the stages of a best pipeline from one state to another, on all machines."""
        best_s = self.row(first, bound)
        steps: list[StageSpan] = []
        machines = self._level.machines
        while True:
            value_s = best_s[machines, last]
            alone_s = first_stage_s(
                self._level, self.work_s[first], self._parameter_bytes[first], machines
            )
            if alone_s[last] == value_s:
                return [StageSpan(first, last, machines), *reversed(steps)]
            for replicas in range(1, machines):
                reached_s = np.maximum(
                    best_s[machines - replicas], self._later_s[replicas][:, last]
                )
                found = np.flatnonzero(reached_s == value_s)
                if len(found):
                    break
            else:
                raise AssertionError("no stage leads to the value in the table")
            steps.append(StageSpan(int(found[0]), last, replicas))
            last, machines = int(found[0]), machines - replicas


def work_table(states: States, nested: NDArray[np.bool_]) -> Floats:
    """Return C of the lowest level: forward and backward seconds between nested states."""
    times_s = states.times_s
    return np.where(nested, times_s[None, :] - times_s[:, None], np.inf)


class PipelineTables:
    """The dynamic programs of all levels over all states.

    Levels go from the lowest to the highest. ``bases`` are the states at which a stage of the
    highest level may begin: only for them are ranges of the level below solved. The best pipeline
    from nothing to everything costs at most ``upper_s``.
    """

    def __init__(
        self,
        states: States,
        levels: Sequence[MachineLevel],
        bases: NDArray[np.intp],
        upper_s: float = math.inf,
    ) -> None:
        self._tables: list[LevelTable] = []
        self._last = states.last
        below = math.prod(level.machines for level in levels[:-1])
        done_s, rest_s = states.times_s / below, (states.times_s[-1] - states.times_s) / below
        self._bound = None
        if upper_s < math.inf:
            slack_s = 1e-12 * float(done_s[-1])
            upper_s = upper_s * (1 + 1e-12) + slack_s
            self._bound = PipelineBound(
                upper_s, done_s - slack_s, rest_s - slack_s, levels[-1].machines
            )
        work_s = work_table(states, states.nested())
        for depth, level in enumerate(levels):
            self._tables.append(LevelTable(level, states, work_s))
            if depth + 1 < len(levels):
                rows = bases if depth + 2 == len(levels) else np.arange(len(states) - 1)
                work_s = np.full_like(work_s, np.inf)
                for first in rows:
                    work_s[first] = self._tables[depth].row(int(first))[level.machines]

    def value_s(self, first: int, last: int) -> float:
        """Return the cost of the top level's best pipeline from one state to another."""
        depth = len(self._tables) - 1
        return float(self._tables[-1].row(first, self._bound_of(depth, first, last))[-1, last])

    def steps(self, depth: int, first: int, last: int) -> list[StageSpan]:
        """Return the stages of a best pipeline of one level, counted from the lowest, 0."""
        return self._tables[depth].steps(first, last, self._bound_of(depth, first, last))

    def _bound_of(self, depth: int, first: int, last: int) -> PipelineBound | None:
        whole = depth == len(self._tables) - 1 and (first, last) == (0, self._last)
        return self._bound if whole else None
