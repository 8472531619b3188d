"""The states of a profile graph, PipeDream's search space, and their costs.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
SOSP 2019, and the optimizer published with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Infeasible, InvalidInput
from ..dag.downsets import Dag, Rows, as_rows, enumerate_grown_downsets, membership, nodes_of

Floats = NDArray[np.float64]

MAX_STATES = 2_000_000
"""Beyond, the states alone take more than a gigabyte."""

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


def graph_states(graph: CostGraph, limit: int = MAX_STATES) -> States:
    """Enumerate the states of a profile graph.

    They grow out of the closure of the first source in the profile's order by adding closures of
    successors; nodes not connected to that source are in none of them.

    Raises:
        Infeasible: There are more than ``limit`` states.
    """
    dag = graph.dag
    grown = enumerate_grown_downsets(dag, dag.sources[0], limit)
    if grown is None:
        raise Infeasible(
            f"the graph of {dag.num_nodes} nodes has more than {limit} states; merge nodes that "
            "need not be cut apart, or allow more",
            constraint="states",
            available=limit,
        )
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


def chain_states(
    times_s: Sequence[float], parameter_bytes: Sequence[float], boundary_bytes: Sequence[float]
) -> States:
    """Return the states of layers in a row; a cut after layer i sends ``boundary_bytes[i]``.

    Raises:
        InvalidInput: There are no layers, the lengths do not fit (L, L and L - 1), or a cost is
            negative or not finite.
    """
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
