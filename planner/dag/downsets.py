"""Predecessor-closed sets of a directed acyclic graph, and graphs made smaller by merging runs.

A set of nodes is predecessor-closed (a downset) if it holds every predecessor of every node in
it: what may lie in front of a cut. A graph of branches can have many more of them than nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput

Rows = NDArray[np.uint64]
"""Sets as bits, one a row: node v is bit v % 64 of word v // 64."""

_ONE = np.uint64(1)
_WORD = 64


@dataclass(frozen=True)
class Dag:
    """Nodes 0 to ``num_nodes`` - 1 and the edges between them.

    Sets of nodes are plain integers here: node v is bit v.

    Raises:
        InvalidInput: An edge names a node that is not there, or the edges close a cycle.
    """

    num_nodes: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for source, target in self.edges:
            if not (0 <= source < self.num_nodes and 0 <= target < self.num_nodes):
                raise InvalidInput(
                    f"an edge goes from node {source} to {target}; nodes are 0 to "
                    f"{self.num_nodes - 1}"
                )
        if len(self.order) < self.num_nodes:
            rest = sorted(set(range(self.num_nodes)) - set(self.order))
            raise InvalidInput(f"the edges close a cycle among the nodes {rest[:10]}")

    @cached_property
    def predecessors(self) -> tuple[int, ...]:
        """Return, per node, the set of sources of its incoming edges."""
        sets = [0] * self.num_nodes
        for source, target in self.edges:
            sets[target] |= 1 << source
        return tuple(sets)

    @cached_property
    def successors(self) -> tuple[int, ...]:
        """Return, per node, the set of targets of its outgoing edges."""
        sets = [0] * self.num_nodes
        for source, target in self.edges:
            sets[source] |= 1 << target
        return tuple(sets)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the topological order that prefers the smallest node.

        Nodes on a cycle, or behind one, are left out.
        """
        waiting = [predecessors.bit_count() for predecessors in self.predecessors]
        ready = [node for node in range(self.num_nodes) if not waiting[node]]
        order = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for target in nodes_of(self.successors[node]):
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, target)
        return tuple(order)

    @cached_property
    def closures(self) -> tuple[int, ...]:
        """Return, per node, the node itself and everything it depends on."""
        closures = [0] * self.num_nodes
        for node in self.order:
            closures[node] = 1 << node
            for source in nodes_of(self.predecessors[node]):
                closures[node] |= closures[source]
        return tuple(closures)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Return the nodes without predecessors, ascending."""
        return tuple(node for node in range(self.num_nodes) if not self.predecessors[node])


def nodes_of(members: int) -> list[int]:
    """Return the nodes of a set, ascending."""
    nodes = []
    while members:
        # x & -x keeps only the lowest bit set.
        lowest = members & -members
        nodes.append(lowest.bit_length() - 1)
        members ^= lowest
    return nodes


def as_rows(sets: Sequence[int], num_nodes: int) -> Rows:
    """Return sets as rows of bits, [sets, words]."""
    num_words = max(1, -(-num_nodes // _WORD))
    data = b"".join(members.to_bytes(8 * num_words, "little") for members in sets)
    words = np.frombuffer(data, dtype="<u8").reshape(len(sets), num_words)
    return words.astype(np.uint64)


def as_set(row: Rows) -> int:
    """Return one row of bits as a set."""
    return int.from_bytes(row.astype("<u8").tobytes(), "little")


def membership(rows: Rows, num_nodes: int) -> NDArray[np.uint8]:
    """Return an array [sets, nodes] with 1 where a node is in a set."""
    octets = np.ascontiguousarray(rows.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little")[:, :num_nodes]


def enumerate_downsets(dag: Dag, limit: int) -> Rows | None:
    """Enumerate the predecessor-closed sets, from the empty set to the whole graph.

    Breadth first by size: sets of k nodes come from those of k - 1 by adding a node whose
    predecessors are all there. O(sets x width) word operations in numpy. Sets come in order of size
    and, within a size, in a fixed order; None if there are more than ``limit``.
    """
    predecessors = as_rows(dag.predecessors, dag.num_nodes)
    rows = as_rows([0], dag.num_nodes)
    found: list[Rows] = []
    count = 0
    while len(rows):
        found.append(rows)
        count += len(rows)
        if count > limit:
            return None
        # A node that is in every set, or that none of them leads to, extends none.
        union = as_set(np.bitwise_or.reduce(rows, axis=0))
        common = as_set(np.bitwise_and.reduce(rows, axis=0))
        reach = sum(1 << node for node in dag.sources)
        for node in nodes_of(union):
            reach |= dag.successors[node]
        grown = [rows[:0]]
        for node in nodes_of(reach & ~common):
            word, bit = divmod(node, _WORD)
            may = (rows[:, word] >> np.uint64(bit)) & _ONE == 0
            # All predecessors are inside if none is in the complement.
            may &= ~meets(~rows, predecessors[node])
            larger = rows[may]
            larger[:, word] |= _ONE << np.uint64(bit)
            grown.append(larger)
        rows = drop_repeats(np.concatenate(grown))
    return np.concatenate(found)


def meets(rows: Rows, members: Rows) -> NDArray[np.bool_]:
    """Return a mask of the rows that have a node in common with one set."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for word in np.flatnonzero(members):
        found |= rows[:, word] & members[word] != 0
    return found


def _hashes(rows: Rows) -> NDArray[np.uint64]:
    """Hash each row; the odd multipliers affect only speed, not the result."""
    factors = np.arange(1, 2 * rows.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = rows * factors
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(np.bitwise_xor.reduce(mixed, axis=1))


def drop_repeats(rows: Rows) -> Rows:
    """Remove duplicate rows: sort by hash and compare rows with equal hashes in full."""
    hashes = _hashes(rows)
    order = np.argsort(hashes, kind="stable")
    rows, hashes = rows[order], hashes[order]
    is_new = np.ones(len(rows), dtype=np.bool_)
    is_new[1:] = hashes[1:] != hashes[:-1]
    repeats = np.flatnonzero(~is_new)
    if not np.array_equal(rows[repeats], rows[repeats - 1]):
        return np.unique(rows, axis=0)
    return rows[is_new]


@dataclass(frozen=True)
class Contraction:
    """A graph whose nodes stand for groups of another graph's nodes.

    Its downsets, written out in the groups' members, are downsets of the other graph.
    """

    dag: Dag
    members: tuple[int, ...]

    def expand(self, nodes: int) -> int:
        """Return the set of members of a set of nodes."""
        expanded = 0
        for node in nodes_of(nodes):
            expanded |= self.members[node]
        return expanded


def contract(dag: Dag, groups: Sequence[Iterable[int]]) -> Contraction:
    """Merge each group into one node; edges inside a group go, parallel ones become one."""
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for node in group:
            if node in group_of:
                raise InvalidInput(f"node {node} is in two groups")
            group_of[node] = index
    if sorted(group_of) != list(range(dag.num_nodes)):
        raise InvalidInput(f"the groups are not the {dag.num_nodes} nodes, each once")
    edges = {(group_of[source], group_of[target]) for source, target in dag.edges}
    members = [0] * len(groups)
    for node, index in group_of.items():
        members[index] |= 1 << node
    kept = tuple(sorted((source, target) for source, target in edges if source != target))
    return Contraction(Dag(len(groups), kept), tuple(members))


def contract_chains(dag: Dag) -> Contraction:
    """Merge runs of nodes that have one another as only successor and only predecessor."""
    runs: list[list[int]] = []
    for node in dag.order:
        if _continues(dag, node):
            continue
        run = [node]
        while (following := dag.successors[run[-1]]).bit_count() == 1:
            target = following.bit_length() - 1
            if not _continues(dag, target):
                break
            run.append(target)
        runs.append(run)
    return contract(dag, runs)


def _continues(dag: Dag, node: int) -> bool:
    """Return True if a node is the only successor of its only predecessor."""
    before = dag.predecessors[node]
    return before.bit_count() == 1 and dag.successors[before.bit_length() - 1].bit_count() == 1


def contract_parallel(dag: Dag) -> Contraction:
    """Merge nodes that have the same predecessors and the same successors."""
    alike: dict[tuple[int, int], list[int]] = {}
    for node in dag.order:
        alike.setdefault((dag.predecessors[node], dag.successors[node]), []).append(node)
    return contract(dag, list(alike.values()))


def contract_series_parallel(dag: Dag, limit: int) -> Contraction:
    """Merge chains and parallel nodes in turn until at most ``limit`` downsets are left.

    Stops earlier when nothing is left to merge, so the caller still has to count.
    """
    whole = Contraction(dag, tuple(1 << node for node in range(dag.num_nodes)))
    is_stuck = False
    for step in cycle((contract_chains, contract_parallel)):
        if enumerate_downsets(whole.dag, limit) is not None:
            break
        smaller = step(whole.dag)
        if smaller.dag.num_nodes == whole.dag.num_nodes:
            if is_stuck:
                break
            is_stuck = True
            continue
        is_stuck = False
        whole = Contraction(smaller.dag, tuple(whole.expand(group) for group in smaller.members))
    return whole
