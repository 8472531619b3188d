"""PipeDream's objective, known faults included, and the split that minimises it.

For comparison only: it says what PipeDream would have chosen and what it would have believed.
Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
SOSP 2019, and the optimizer published with it.

On one level M machines share links of B bytes/s. Choose nested states I_1 < ... < I_S, the last
of them everything, and replicas r_t that add up to exactly M, so that the largest of these is
least, in seconds per minibatch:

    first stage      (T_1 + 4 (r_1 - 1) W_1 / (B r_1) / L) / r_1
    stage t >= 2     (T_t + 4 (r_t - 1) W_t / (B r_t)) / r_t
    every t >= 2     2 a(I_{t-1}) / (B r_t) and, unless I_t is everything, 2 a(I_t) / (B r_t)

T are seconds of forward and backward, W parameter bytes, a(I) the bytes charged for a cut behind
I (`pipedream_states`); L is 1 at the lowest level and the machines of the level below at others.
Behind each level T of a range becomes that level's optimum for it on all its machines.

Where this differs from what a pipeline does, and from our own objectives:

* the first stage is never charged for what it sends;
* transfers are compared with the work by max, not added to it;
* only the first stage's gradient exchange is divided by L;
* a(I) counts a fork again when all its branches are inside;
* every machine is used, whether it helps or not;
* nodes not connected to the first source are left out;
* memory is not looked at here.

The published optimizer also prices, on lower levels, ranges between states of which neither holds
the other. They are no sets of nodes; here they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import InvalidInput
from ..dag.downsets import as_set, nodes_of
from .dynamic_program import CostGraph, MachineLevel, States, chain_states, graph_states
from .search import SplitBounds, SplitStage, best_split

TOLERANCE = 1e-4
"""Relative gap at which the search of a large graph stops; a small one is solved exactly."""

MAX_MACHINES = 512
"""Per level: tables grow with their square."""


@dataclass(frozen=True)
class PipeDreamStage:
    """A stage at one level of the machine hierarchy.

    Attributes:
        node_ids: The nodes, in the profile's order.
        replicas: How many machines of this level share its minibatches.
        inner: The pipeline inside each of those machines; empty at the lowest level.
    """

    node_ids: tuple[str, ...]
    replicas: int
    inner: tuple[PipeDreamStage, ...] = ()


@dataclass(frozen=True)
class PipeDreamSplit:
    """The best split found by PipeDream's objective.

    Attributes:
        value_s: Its objective in seconds per minibatch.
        lower_bound_s: No split has a smaller one.
        stages: Of the highest level, in order.
        num_states: How many states there were to choose from.
        left_out: Nodes in no stage, because nothing connects them to the first source.
    """

    value_s: float
    lower_bound_s: float
    stages: tuple[PipeDreamStage, ...]
    num_states: int
    left_out: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Return (value - lower bound) / value; 0 if both are 0."""
        return (self.value_s - self.lower_bound_s) / self.value_s if self.value_s else 0.0


def pipedream_split(
    graph: CostGraph, machines: Sequence[int], bandwidths_bytes_per_s: Sequence[float]
) -> PipeDreamSplit:
    """Find the split of a profile graph that minimises PipeDream's objective.

    Exact where the tables of all states fit; otherwise within `TOLERANCE`, or as near as the
    search came: ``gap`` says so.

    Args:
        graph: What to split.
        machines: Per level, the lowest first: how many of the level below (at the lowest level:
            machines) one unit of this level has.
        bandwidths_bytes_per_s: Per level, of the links inside one unit.

    Raises:
        InvalidInput: No levels, lengths that differ, less than one machine, or a bandwidth that
            is not positive and finite.
        Infeasible: The graph has too many states to list.
    """
    levels = pipedream_levels(machines, bandwidths_bytes_per_s)
    return split_states(graph, graph_states(graph), levels)


def split_states(
    graph: CostGraph, states: States, levels: Sequence[MachineLevel]
) -> PipeDreamSplit:
    """Run `pipedream_split` on states that were enumerated before."""
    found = best_split(states, levels, TOLERANCE)
    left_out = [
        node_id
        for node, node_id in enumerate(graph.node_ids)
        if not as_set(states.rows[-1]) >> node & 1
    ]
    return _as_split(found, states, graph.node_ids, tuple(left_out))


def pipedream_chain(
    times_s: Sequence[float],
    parameter_bytes: Sequence[float],
    boundary_bytes: Sequence[float],
    machines: Sequence[int],
    bandwidths_bytes_per_s: Sequence[float],
) -> PipeDreamSplit:
    """Find the best split of L layers in a row; nodes are named by position, from "0".

    Exact; O(L^2 M^2) on one level.
    """
    levels = pipedream_levels(machines, bandwidths_bytes_per_s)
    states = chain_states(times_s, parameter_bytes, boundary_bytes)
    names = tuple(str(layer) for layer in range(len(times_s)))
    return _as_split(best_split(states, levels, TOLERANCE), states, names, ())


def pipedream_value(
    graph: CostGraph,
    stages: Sequence[PipeDreamStage],
    machines: Sequence[int],
    bandwidths_bytes_per_s: Sequence[float],
) -> float:
    """Compute PipeDream's objective of a given split, in seconds per minibatch.

    Written apart from the search, so that the two check each other.

    Raises:
        InvalidInput: The stages are not a split: a set is not one of PipeDream's states, nodes
            are missing or placed twice, replicas do not add up to the machines, or the levels do
            not match.
    """
    levels = pipedream_levels(machines, bandwidths_bytes_per_s)
    return _Recount(graph, levels).value_s(stages, len(levels) - 1, 0)


class _Recount:
    """The module's formula evaluated directly on sets of nodes."""

    def __init__(self, graph: CostGraph, levels: Sequence[MachineLevel]) -> None:
        self._graph = graph
        self._levels = levels
        self._numbers = {node_id: node for node, node_id in enumerate(graph.node_ids)}
        self._everything = self._grown(~0)

    def value_s(self, stages: Sequence[PipeDreamStage], depth: int, before: int) -> float:
        """Return the objective of one level's pipeline that begins behind the set ``before``."""
        level = self._levels[depth]
        if sum(stage.replicas for stage in stages) != level.machines:
            raise InvalidInput(
                f"the replicas {[stage.replicas for stage in stages]} do not add up to the "
                f"{level.machines} machines of level {depth}"
            )
        value_s, is_first = 0.0, True
        for stage in stages:
            members = self._members(stage, before)
            after = before | members
            work_s = self._work_s(stage, depth, before, members)
            weights = math.fsum(self._graph.parameter_bytes[node] for node in nodes_of(members))
            rate = level.bandwidth_bytes_per_s * stage.replicas
            sync_s = 4 * (stage.replicas - 1) * weights / rate
            if is_first:
                sync_s /= level.machines_below
            else:
                value_s = max(value_s, 2 * self._boundary_bytes(before) / rate)
                if after != self._everything:
                    value_s = max(value_s, 2 * self._boundary_bytes(after) / rate)
            value_s = max(value_s, (work_s + sync_s) / stage.replicas)
            before, is_first = after, False
        if depth == len(self._levels) - 1 and before != self._everything:
            missing = nodes_of(self._everything & ~before)
            raise InvalidInput(f"nodes {[self._graph.node_ids[n] for n in missing]} are missing")
        return value_s

    def _work_s(self, stage: PipeDreamStage, depth: int, before: int, members: int) -> float:
        if depth == 0:
            if stage.inner:
                raise InvalidInput("a stage of the lowest level has stages inside")
            return math.fsum(self._graph.times_s[node] for node in nodes_of(members))
        if {node for inner in stage.inner for node in inner.node_ids} != set(stage.node_ids):
            raise InvalidInput("the stages inside a stage do not have its nodes")
        return self.value_s(stage.inner, depth - 1, before)

    def _members(self, stage: PipeDreamStage, before: int) -> int:
        unknown = [node_id for node_id in stage.node_ids if node_id not in self._numbers]
        if unknown or not stage.node_ids or stage.replicas < 1:
            raise InvalidInput(f"a stage has no nodes, no replicas or unknown nodes {unknown}")
        members = 0
        for node_id in stage.node_ids:
            if (before | members) >> self._numbers[node_id] & 1:
                raise InvalidInput(f"node {node_id} is placed twice")
            members |= 1 << self._numbers[node_id]
        if self._grown(before | members) != before | members:
            raise InvalidInput(
                f"the nodes up to {stage.node_ids[-1]} are not one of PipeDream's states"
            )
        return members

    def _grown(self, within: int) -> int:
        """Return the largest state inside a set of nodes; 0 if there is none."""
        dag = self._graph.dag
        state = dag.closures[dag.sources[0]]
        if state & ~within:
            return 0
        waiting = nodes_of(state)
        while waiting:
            for target in nodes_of(dag.successors[waiting.pop()] & ~state):
                closure = dag.closures[target]
                if not closure & ~within:
                    waiting += nodes_of(closure & ~state)
                    state |= closure
        return state

    def _boundary_bytes(self, state: int) -> float:
        """Return a(I), charged for maximal nodes and for nodes below one that others read."""
        dag = self._graph.dag
        charged = set()
        for top in nodes_of(state):
            if dag.successors[top] & state:
                continue
            charged.add(top)
            for node in nodes_of(dag.closures[top]):
                if any(
                    not dag.closures[top] >> reader & 1 for reader in nodes_of(dag.successors[node])
                ):
                    charged.add(node)
        return math.fsum(self._graph.activation_bytes[node] for node in charged)


def pipedream_levels(
    machines: Sequence[int], bandwidths: Sequence[float]
) -> tuple[MachineLevel, ...]:
    """Check the machine hierarchy and return its levels."""
    if not machines or len(machines) != len(bandwidths):
        raise InvalidInput(
            f"{len(machines)} numbers of machines and {len(bandwidths)} bandwidths; give one of "
            "each per level, and at least one level"
        )
    for count, bandwidth in zip(machines, bandwidths, strict=True):
        if not 1 <= count <= MAX_MACHINES:
            raise InvalidInput(f"{count} machines; a level has 1 to {MAX_MACHINES}")
        if not (math.isfinite(bandwidth) and bandwidth > 0):
            raise InvalidInput(f"bandwidth {bandwidth} is not positive and finite")
    below = (1, *machines[:-1])
    return tuple(
        MachineLevel(int(count), float(bandwidth), int(fewer))
        for count, bandwidth, fewer in zip(machines, bandwidths, below, strict=True)
    )


def _as_split(
    found: SplitBounds, states: States, node_ids: Sequence[str], left_out: tuple[str, ...]
) -> PipeDreamSplit:
    return PipeDreamSplit(
        value_s=found.value_s,
        lower_bound_s=found.lower_bound_s,
        stages=tuple(_as_stage(piece, states, node_ids) for piece in found.pieces),
        num_states=states.last,
        left_out=left_out,
    )


def _as_stage(piece: SplitStage, states: States, node_ids: Sequence[str]) -> PipeDreamStage:
    rows = states.rows
    members = as_set(np.bitwise_and(rows[piece.last], ~rows[piece.first]))
    return PipeDreamStage(
        tuple(node_ids[node] for node in nodes_of(members)),
        piece.replicas,
        tuple(_as_stage(inner, states, node_ids) for inner in piece.inner),
    )
