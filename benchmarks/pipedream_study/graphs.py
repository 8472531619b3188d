"""PipeDream's objective over graphs: its states, the best split, and its value counted again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.formats.pipedream_graph import PipeDreamGraph, drop_inputs_and_unused
from stagewright.planner.dag.downsets import (
    Dag,
    Rows,
    as_rows,
    as_set,
    drop_repeats,
    meets,
    nodes_of,
)
from stagewright.planner.pipedream.dynamic_program import MachineLevel, States, check_costs
from stagewright.planner.pipedream.objective import (
    TOLERANCE,
    PipeDreamSplit,
    PipeDreamStage,
    as_split,
    pipedream_levels,
)
from stagewright.planner.pipedream.search import best_split

Floats = NDArray[np.float64]

MAX_BYTES = 10**9
"""Of the tables of a graph's states; a graph that needs more is refused before they are made."""

STATE_BYTES = 200
"""Of a state beside its rows: three sums, indices of its successors, and what the search keeps."""

TINY = 1e-250
"""Less than any cost in use; keeps a logarithm finite."""


@dataclass(frozen=True)
class CostGraph:
    """A profile graph with the cost of each node, in the profile's order.

    Attributes:
        node_ids: What the nodes are called.
        dag: Who reads whose output.
        times_s: Forward and backward of a minibatch together.
        parameter_bytes: Weights of each node.
        activation_bytes: Output of each node.

    Raises:
        InvalidInput: There are no nodes, the lengths differ, or a cost is negative or not finite.
    """

    node_ids: tuple[str, ...]
    dag: Dag
    times_s: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.node_ids:
            raise InvalidInput("there are no nodes to plan")
        if self.dag.num_nodes != len(self.node_ids):
            raise InvalidInput(f"{self.dag.num_nodes} nodes have {len(self.node_ids)} ids")
        for name in ("times_s", "parameter_bytes", "activation_bytes"):
            check_costs(name, getattr(self, name), len(self.node_ids))


def to_cost_graph(graph: PipeDreamGraph) -> CostGraph:
    """Convert to the graph `planner.pipedream` takes: computing nodes in file order."""
    graph = drop_inputs_and_unused(graph)
    numbers = {node.node_id: number for number, node in enumerate(graph.nodes)}
    return CostGraph(
        node_ids=tuple(numbers),
        dag=Dag(len(numbers), tuple((numbers[a], numbers[b]) for a, b in graph.edges)),
        times_s=tuple(node.forward_time_s + node.backward_time_s for node in graph.nodes),
        parameter_bytes=tuple(node.parameter_bytes for node in graph.nodes),
        activation_bytes=tuple(node.activation_bytes for node in graph.nodes),
    )


def most_states(dag: Dag) -> int:
    """Return how many states of a graph fit into `MAX_BYTES`."""
    row_bytes = 8 * -(-dag.num_nodes // 64)
    # The rows themselves, with and without their columns swapped, and what is charged to each.
    return MAX_BYTES // (4 * row_bytes + STATE_BYTES)


def graph_states(graph: CostGraph, limit: int | None = None) -> States:
    """Enumerate the states of a profile graph.

    They grow out of the closure of the first source in the profile's order by adding closures of
    successors; nodes not connected to that source are in none of them. They are counted first, by
    size, of which two or three are held at once.

    Raises:
        Infeasible: There are more than ``limit``, by default those that fit into `MAX_BYTES`.
    """
    dag = graph.dag
    limit = most_states(dag) if limit is None else limit
    if count_grown_downsets(dag, dag.sources[0], limit) is None:
        raise Infeasible(
            f"the graph of {dag.num_nodes} nodes has more than {limit} states; merge nodes that "
            "need not be cut apart, or allow more",
            constraint="states",
            available=limit,
        )
    grown = enumerate_grown_downsets(dag, dag.sources[0], limit)
    assert grown is not None
    rows = np.concatenate([as_rows([0], dag.num_nodes), grown])
    times_s, parameter_bytes = _sums(rows, graph.times_s, graph.parameter_bytes).T
    boundary_bytes = _sums(_charged(dag, rows), graph.activation_bytes)[:, 0]
    return States(
        np.ascontiguousarray(times_s),
        np.ascontiguousarray(parameter_bytes),
        boundary_bytes,
        rows,
        dag.num_nodes,
    )


def enumerate_grown_downsets(dag: Dag, start: int, limit: int) -> Rows | None:
    """Enumerate PipeDream's states in order of size, or return None if more than ``limit``.

    These are the closure of ``start``, and of every such set the sets made by adding the closure
    of a successor of one of its nodes. With a single source they are all downsets but the empty
    one; with several, a source is never taken before one of its successors. The largest is the
    part of the graph connected to ``start``.
    """
    found: list[Rows] = []
    for rows in grow_downsets(dag, start):
        found.append(rows)
        if sum(map(len, found)) > limit:
            return None
    return np.concatenate(found)


def count_grown_downsets(dag: Dag, start: int, limit: int) -> int | None:
    """Count what `enumerate_grown_downsets` returns without keeping it; None above ``limit``."""
    count = 0
    try:
        for rows in grow_downsets(dag, start, most=max(2 * limit, 100_000)):
            count += len(rows)
            if count > limit:
                return None
    except TooManySets:
        return None
    return count


class TooManySets(Exception):
    """More sets are under way than may be held."""


def grow_downsets(dag: Dag, start: int, most: float = math.inf) -> Iterator[Rows]:
    """Yield PipeDream's states of one size after another.

    Raises:
        TooManySets: More than ``most``, repeats included, wait to be looked at.
    """
    closures = as_rows(dag.closures, dag.num_nodes)
    predecessors = as_rows(dag.predecessors, dag.num_nodes)
    first = dag.closures[start]
    # By size: batches of sets with repeats.
    pending = {first.bit_count(): [as_rows([first], dag.num_nodes)]}
    while pending:
        rows = drop_repeats(np.concatenate(pending.pop(min(pending))))
        yield rows
        reach = 0
        for node in nodes_of(as_set(np.bitwise_or.reduce(rows, axis=0))):
            reach |= dag.successors[node]
        for node in nodes_of(reach & ~as_set(np.bitwise_and.reduce(rows, axis=0))):
            word, bit = divmod(node, 64)
            may = (rows[:, word] >> np.uint64(bit)) & np.uint64(1) == 0
            may &= meets(rows, predecessors[node])
            grown = rows[may] | closures[node]
            sizes = np.bitwise_count(grown).sum(axis=1, dtype=np.intp)
            for larger in np.unique(sizes):
                pending.setdefault(int(larger), []).append(grown[sizes == larger])
            if sum(len(batch) for batches in pending.values() for batch in batches) > most:
                raise TooManySets


def _sums(rows: Rows, *costs: Sequence[float]) -> Floats:
    """Sum node costs over each set, [sets, costs], one lookup table per octet.

    Costs are first rounded to a multiple of a power of two that makes every sum exact, which
    moves them by less than a sum's own rounding would. So a set never costs less than a subset.
    """
    table = np.array(costs, dtype=np.float64).T
    grain = np.exp2(np.ceil(np.log2(np.maximum(table.sum(axis=0), TINY))) - 52)
    octets = np.ascontiguousarray(rows.astype("<u8")).view(np.uint8)
    padded = np.zeros((8 * octets.shape[1], len(costs)))
    padded[: len(table)] = np.round(table / grain)
    digits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    sums = np.zeros((len(rows), len(costs)))
    for position in range(octets.shape[1]):
        nodes = padded[8 * position : 8 * position + 8]
        if nodes.any():
            sums += (digits @ nodes)[octets[:, position]]
    return np.asarray(sums * grain)


def _charged(dag: Dag, rows: Rows) -> Rows:
    """Return the nodes whose activations PipeDream charges to a cut behind each state.

    Each maximal node x of the state, and every node below x with a successor that is neither x
    nor below x. A fork whose branches are all inside is charged too: one of PipeDream's faults.
    """
    columns = np.ascontiguousarray(rows.T)
    charged = np.zeros_like(columns)
    successors = as_rows(dag.successors, dag.num_nodes)
    forks = as_rows([_charged_below(dag, node) for node in range(dag.num_nodes)], dag.num_nodes)
    for node in range(dag.num_nodes):
        word, bit = divmod(node, 64)
        is_maximal = (columns[word] >> np.uint64(bit)) & np.uint64(1) == 1
        for other in np.flatnonzero(successors[node]):
            is_maximal &= columns[other] & successors[node, other] == 0
        states = np.flatnonzero(is_maximal)
        for other in np.flatnonzero(forks[node]):
            charged[other, states] |= forks[node, other]
    return np.ascontiguousarray(charged.T)


def _charged_below(dag: Dag, node: int) -> int:
    """Return a node and those below it that are read outside its closure."""
    closure, charged = dag.closures[node], 1 << node
    for below in nodes_of(closure):
        if dag.successors[below] & ~closure:
            charged |= 1 << below
    return charged


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
    return as_split(found, states, graph.node_ids, tuple(left_out))


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
