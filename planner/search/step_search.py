"""Best-first search for the plan of least simulated step, by bounds on beginnings of plans.

A node is the first stages of a plan and the `StepState` of all that may follow. Its bound is the
larger of `bound_steps` for these stages, with the least round trip behind them, and of the state's
own bound with what is in front added. The nodes of least bound are extended by every stage that may
follow; whole plans are handed out in order of their bounds, to be simulated. Once the least bound
left is the best step known, no plan is faster, but for plans that were yielded and may be faster in
another place; if the search is given up before, that bound still holds for all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from ..simulator.step_bound import StageColumns, bound_steps
from .arcs import StageArc
from .device_pool import Floats, Integers
from .step_graph import ArcColumns, StageStep, StateBounds, StepGraph, StepState

ROUNDING = 1e-12
"""Bounds are lowered by this share, as their sums may be rounded up."""

BATCH = 32
"""Nodes extended at once: arrays of several cost little more than those of one."""

PER_CALL = 8_000
"""What extending nodes by one step costs beside the pairs of stages that are looked at."""


class Node(NamedTuple):
    """The first stages of some plans, ordered by the bound on all of them.

    Columns are, for each stage, forward, backward, sends there and back, gradient summing,
    replicas and depth, as `StageColumns` has them; shape (7, stages).
    """

    bound_s: float
    order: int
    graph: int
    position: int
    state: StepState
    arcs: tuple[StageArc, ...]
    columns: Floats


class StepSearch:
    """Search of several graphs at once, each with seconds that all its plans spend in addition.

    ``limit_s`` is the best step known; lower it when a plan is faster. ``least_yielded_s`` is the
    least bound of the plans yielded, which holds for every place of their stages.
    """

    def __init__(self, graphs: Sequence[tuple[StepGraph, float]], limit_s: float) -> None:
        self.graphs, self.limit_s = graphs, limit_s
        self._order = count()
        self.open: list[Node] = []
        self.pairs = 0
        self.least_yielded_s = np.inf
        for number, (graph, added_s) in enumerate(graphs):
            for bound_s, state in graph.starts():
                self._push(bound_s + added_s, number, 0, state, (), np.zeros((8, 0)))

    @property
    def bound_s(self) -> float:
        """Return a bound on every plan not handed out yet, at most the limit."""
        least_s = self.open[0].bound_s if self.open else np.inf
        return min(least_s, self.limit_s)

    def plans(self, max_pairs: int) -> Iterator[tuple[StageArc, ...]]:
        """Yield whole plans, those of least bound first, until so many pairs were looked at."""
        self.pairs = 0
        while self.open and self.open[0].bound_s < self.limit_s:
            if self._is_whole(self.open[0]):
                self.least_yielded_s = min(self.least_yielded_s, self.open[0].bound_s)
                yield heapq.heappop(self.open).arcs
                continue
            if self.pairs > max_pairs:
                return
            nodes: list[Node] = []
            while len(nodes) < BATCH and self.open and not self._is_whole(self.open[0]):
                nodes.append(heapq.heappop(self.open))
            self._extend_all(nodes)

    def beam(self, width: int) -> Iterator[tuple[StageArc, ...]]:
        """Yield whole plans, found by keeping the best nodes of each state and number of stages.

        Nothing is proven by it, and it takes the search's place: no more is open afterwards.
        """
        while self.open:
            # By state, because the bounds of those with more devices left are looser.
            nodes, kept = [], defaultdict[tuple[int, StepState], int](int)
            for node in sorted(self.open):
                kept[node.graph, node.state] += 1
                if kept[node.graph, node.state] <= width:
                    nodes.append(node)
            self.open = []
            self._extend_all(nodes)
            whole = sorted(filter(self._is_whole, self.open))
            self.open = [node for node in self.open if not self._is_whole(node)]
            yield from (node.arcs for node in whole[:width])

    def _extend_all(self, nodes: list[Node]) -> None:
        groups: dict[tuple[int, StepState, int], list[Node]] = {}
        for node in nodes:
            groups.setdefault((node.graph, node.state, len(node.arcs)), []).append(node)
        for alike in groups.values():
            self._extend(alike)

    def _is_whole(self, node: Node) -> bool:
        return node.position == self.graphs[node.graph][0].num_atoms

    def _push(
        self, bound_s: float, graph: int, position: int, state: StepState,
        arcs: tuple[StageArc, ...], columns: Floats,
    ) -> None:  # fmt: skip
        bound_s *= 1 - ROUNDING
        if bound_s < self.limit_s:
            heapq.heappush(
                self.open, Node(bound_s, next(self._order), graph, position, state, arcs, columns)
            )

    def _extend(self, nodes: list[Node]) -> None:
        """Push every node with one stage more; all are of one graph, state and length."""
        graph, _ = self.graphs[nodes[0].graph]
        begun = np.stack([node.columns for node in nodes])
        for step in graph.bounds[nodes[0].state].steps:
            columns = graph.columns(step.device_class, step.replicas)
            spans = [columns.begin[node.position : node.position + 2].tolist() for node in nodes]
            rows = np.concatenate([np.arange(*span) for span in spans])
            if len(rows):
                owner = np.repeat(np.arange(len(nodes)), [last - first for first, last in spans])
                self._extend_by(nodes, begun, step, rows, owner)

    def _extend_by(
        self, nodes: list[Node], begun: Floats, step: StageStep, rows: Integers, owner: Integers
    ) -> None:
        """Push the nodes that ``owner`` names with the arcs ``rows`` of one step."""
        graph, added_s = self.graphs[nodes[0].graph]
        target = graph.bounds[step.behind]
        columns = graph.columns(step.device_class, step.replicas).take(rows)
        possible = np.isfinite(target.inner_s[columns.last]) & graph.fits(step, columns)
        columns, owner = columns.take(possible), owner[possible]
        if not len(owner):
            return
        found, bounds = self._bound_rows(graph, begun, step, columns, owner, target)
        bounds += added_s
        for row in np.flatnonzero(bounds < self.limit_s).tolist():
            node = nodes[owner[row]]
            arc = StageArc(
                node.position, int(columns.last[row]), step.device_class,
                bool(columns.recompute[row]), step.replicas, step.end,
            )  # fmt: skip
            self._push(
                max(node.bound_s, float(bounds[row])), node.graph, arc.last, step.behind,
                (*node.arcs, arc), found[row],
            )  # fmt: skip

    def _bound_rows(
        self, graph: StepGraph, begun: Floats, step: StageStep, columns: ArcColumns,
        owner: Integers, target: StateBounds,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """Return the columns of every node with its arc, and the bounds on their plans."""
        m, replicas = graph.microbatches(step.replicas)
        last, (there, back) = columns.last, graph.links_s(step, columns.last)
        found = np.empty((len(owner), 8, begun.shape[2] + 1))
        found[:, :, :-1] = begun[owner]
        sync, depth = graph.sync_s(step, columns.gradients), step.behind.ahead
        for row, value in enumerate(
            (columns.forward_s, columns.backward_s, there, back, sync, replicas,
             graph.depth(step.replicas, depth), columns.weights_s)
        ):  # fmt: skip
            found[:, row, -1] = value
        up = (found[:, 0] + found[:, 2]).sum(axis=1)
        down = (found[:, 1] - found[:, 7] + found[:, 3]).sum(axis=1)
        self.pairs += PER_CALL + len(owner) * found.shape[2] ** 2
        plans = StageColumns(
            found[:, 0], found[:, 1], found[:, 2], found[:, 3], found[:, 4],
            found[:, 5].astype(np.int64), found[:, 6].astype(np.int64), target.behind_s[last],
            step.behind.last_replicas or step.replicas, found[:, 7],
        )  # fmt: skip
        bounds = np.maximum.reduce(
            [
                bound_steps(graph.schedule, m, plans),
                up + down + target.inner_s[last],
                up + target.summed_s[last],
            ]
        )
        return found, bounds
