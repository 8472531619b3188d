"""The layer graph of a branched model, cut between sets of layers.

A set of layers may lie in front of a cut if it holds everything its layers read from. Stages are
the differences of such sets, one inside the next, so no stage ever waits for a later one; what
crosses a cut is relayed by every stage it passes. The label search needs nothing else of a
chain: positions are sets, from the empty one to all layers, in order of size.

Layers that have to share a stage are one node: those with no legal cut between them, those the
options keep together, and everything between them in the graph. O(P^2 + stages x shared items)
for P sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ...core.graph.graph import MODEL_INPUT
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ..cost.chain import Mask, Order, Positions, StageTable, tied_parameters
from ..cost.work_limits import WorkLimits
from .downsets import (
    Contraction,
    Dag,
    Rows,
    as_rows,
    contract,
    contract_series_parallel,
    enumerate_downsets,
    membership,
    nodes_of,
)
from .set_costs import Members, SetCosts

MAX_SETS = 20_000
"""Sets that are listed: half a second, and 20 MB for each 1,000 layers."""

MAX_SETS = 3_000
"""More sets are not listed, unless many of them can be left out."""

MAX_STAGES = 600_000
"""Stages between them that are searched; a chain of 1,100 layers has as many."""

MAX_LISTED_SETS = 200_000
"""Sets that are listed to leave out those that no better plan has: a second."""

MAX_LEFT_SETS = 20_000
"""Sets that may be left then: listing the stages between them takes a second."""

MAX_LEFT_STAGES = 3_000_000
"""Stages that may be left: 1 GB, and some 10 s to search them."""


@dataclass(frozen=True, eq=False)
class BranchStages(StageTable):
    """Stages between sets of layers."""

    members: Members

    def holds(self, layer: int) -> Mask:
        column = self.members[:, layer]
        inside: Mask = column[self.last] != column[self.first]
        return inside

    def layout(self, positions: Sequence[int]) -> tuple[Order, tuple[int, ...]]:
        sets = self.members[list(positions)]
        stage = len(sets) - sets.sum(axis=0, dtype=np.int64)
        order = tuple(np.argsort(stage, kind="stable").tolist())
        cuts = tuple(sets.sum(axis=1, dtype=np.int64).tolist())
        return (() if order == tuple(range(len(order))) else order), cuts

    @property
    def keeps_order(self) -> bool:
        return False

    @cached_property
    def whole_s(self) -> tuple[float, float]:
        # Where long stages are left out, no stage is the whole model.
        loss = self.profile.loss
        forward_s, backward_s = self.front_forward_s[-1], self.front_backward_s[-1]
        return (
            float(forward_s) + (loss.forward.median_s if loss else 0.0),
            float(backward_s) + (loss.backward.median_s if loss else 0.0),
        )


class LayerGraph:
    """The graph of a profile's layers and its stage tables.

    Layers that share a stage are one of its ``nodes``; so do those on both sides of the
    ``forbidden`` cuts, which are layers in front of which no stage may begin.
    """

    def __init__(
        self, profile: Profile, options: PlanOptions, forbidden: Iterable[int] = ()
    ) -> None:
        self.profile = profile
        self.costs = SetCosts(profile)
        self.nodes = _nodes(profile, options, forbidden)

    @cached_property
    def stages(self) -> BranchStages | None:
        """Return every stage of every order, or None if there are too many."""
        return self._table(self.nodes)

    @cached_property
    def coarse(self) -> BranchStages | None:
        """Return a table with runs of layers merged until it is small enough, if it gets so."""
        work = self.costs.forward_s + self.costs.backward_s
        piece = float(work.sum()) / 256
        # From 1/256 of the work to eight times all of it: the last tries merge every run whole.
        for _ in range(12):
            found = self._table(_merged_runs(self.nodes, work.tolist(), piece))
            if found is not None:
                return found
            piece *= 2
        return self._table(_within(self.nodes, contract_series_parallel(self.nodes.dag, MAX_SETS)))

    def within(self, limits: WorkLimits) -> BranchStages | None:
        """Return every stage of every order that keeps the limits, or None if there are too many.

        Stages are left out only if they cannot be in a plan that does.
        """
        rows = enumerate_downsets(self.nodes.dag, MAX_LISTED_SETS)
        if rows is None:
            return None
        work = self._work(self.nodes)
        parts = np.array_split(rows, -(-len(rows) // 10_000))
        front = np.concatenate([membership(part, len(work)) @ work for part in parts])
        kept = limits.allows_cut(front, float(work.sum()))
        kept[[0, -1]] = True  # rounding must not leave out the ends
        if np.count_nonzero(kept) > MAX_LEFT_SETS:
            return None
        rows, front = rows[kept], front[kept]
        pairs = nested_pairs(rows, self.nodes.dag, MAX_LEFT_STAGES, front, limits.longest_s)
        return None if pairs is None else self._stages_between(self.nodes, rows, pairs)

    @cached_property
    def orders(self) -> list[Order]:
        """Return a few good orders other than the profile's own."""
        own = tuple(range(len(self.profile.layers)))
        return [order for order in list_orders(self.nodes, self.costs) if order != own]

    @property
    def is_chain(self) -> bool:
        """Return True if the profile's own order is the graph's only one."""
        order = [layer for node in self.nodes.dag.order for layer in nodes_of(self._layers(node))]
        chained = all(
            self.nodes.dag.predecessors[after] >> before & 1
            for before, after in zip(self.nodes.dag.order, self.nodes.dag.order[1:], strict=False)
        )
        return chained and order == list(range(len(order)))

    def _layers(self, node: int) -> int:
        return self.nodes.members[node]

    def _work(self, nodes: Contraction) -> NDArray[np.float64]:
        layer_s = self.costs.forward_s + self.costs.backward_s
        return np.array([layer_s[nodes_of(layers)].sum() for layers in nodes.members])

    def _table(self, nodes: Contraction) -> BranchStages | None:
        rows = enumerate_downsets(nodes.dag, MAX_SETS)
        pairs = None if rows is None else nested_pairs(rows, nodes.dag, MAX_STAGES)
        if rows is None or pairs is None:
            return None
        return self._stages_between(nodes, rows, pairs)

    def _stages_between(
        self, nodes: Contraction, rows: Rows, pairs: tuple[Positions, Positions]
    ) -> BranchStages:
        first, last = pairs
        of_nodes = membership(rows, nodes.dag.num_nodes)
        node_of = np.zeros(len(self.profile.layers), dtype=np.int64)
        for node, layers in enumerate(nodes.members):
            node_of[nodes_of(layers)] = node
        members = of_nodes[:, node_of]
        return BranchStages(
            profile=self.profile,
            num_atoms=len(members) - 1,
            most_stages=nodes.dag.num_nodes,
            first=first,
            last=last,
            tied=self.costs.tied,
            members=members,
            **self.costs.costs(members, first, last),
        )


def nested_pairs(
    rows: Rows,
    dag: Dag,
    limit: int,
    front_s: NDArray[np.float64] | None = None,
    longest_s: float = math.inf,
) -> tuple[Positions, Positions] | None:
    """Return all pairs of a set and a larger one around it, or None if more than ``limit``.

    With the work of each set, only those between which at most ``longest_s`` lies.
    O(sets^2 x width) byte operations in numpy.
    """
    inside = membership(rows, dag.num_nodes)
    by_node = np.ascontiguousarray(inside.T).view(np.bool_)
    # A set lies in another if its maximal nodes do: those that no node of the set reads from.
    successors = as_rows(dag.successors, dag.num_nodes)
    firsts, lasts, count = [], [], 0
    for index in range(len(rows) - 1):
        begin = index + 1
        members = np.flatnonzero(inside[index])
        maximal = members[~(successors[members] & rows[index]).any(axis=1)]
        around = np.ones(len(rows) - begin, dtype=np.bool_)
        if front_s is not None:
            around &= front_s[begin:] <= front_s[index] + longest_s
        for node in maximal:
            around &= by_node[node, begin:]
        found = np.flatnonzero(around) + begin
        count += len(found)
        if count > limit:
            return None
        firsts.append(np.full(len(found), index, dtype=np.int64))
        lasts.append(found.astype(np.int64))
    return np.concatenate(firsts), np.concatenate(lasts)


def _nodes(profile: Profile, options: PlanOptions, forbidden: Iterable[int]) -> Contraction:
    """Build the graph of layers; those that have to share a stage become one node.

    Joined layers read from each other, as it were; whatever lies on the cycles that makes has to
    be in their stage as well. Where no stage may end behind a layer, the next one of the
    profile's own order joins it; the last layer then stays the last.
    """
    index = {entry.layer.name: layer for layer, entry in enumerate(profile.layers)}
    last = len(profile.layers) - 1
    for name in (*options.no_cut_after, *(name for pair in options.together for name in pair)):
        if name not in index:
            raise InvalidInput(f"the options name layer {name!r}, which the profile does not have")
    joined = [(gap.after, gap.after + 1) for gap in profile.boundaries if not gap.legal]
    joined += [(cut - 1, cut) for cut in forbidden]
    joined += [(index[one], index[other]) for one, other in options.together]
    after = [index[name] for name in options.no_cut_after]
    joined += [(layer, layer + 1) for layer in after if layer < last]
    if options.tied == "together":
        for entry in tied_parameters(profile):
            joined += [(entry.layers[0], layer) for layer in entry.layers[1:]]
    edges = {(edge.source, edge.target) for edge in profile.edges if edge.source != MODEL_INPUT}
    if last in after:
        edges |= {(layer, last) for layer in range(last)}
    # Edges both ways put joined layers on a cycle; strongly connected components are then exactly
    # the smallest groups that leave the graph of stages acyclic.
    both = {pair for one, other in joined for pair in ((one, other), (other, one))}
    groups = [[layer] for layer in range(len(index))]
    if both:
        # Imported here: most requests keep the profile's order and need no networkx.
        import networkx

        graph = networkx.DiGraph([*edges, *both])
        graph.add_nodes_from(range(len(index)))
        groups = sorted(map(sorted, networkx.strongly_connected_components(graph)))
    return contract(Dag(len(index), tuple(sorted(edges))), groups)


def _merged_runs(nodes: Contraction, work: list[float], piece: float) -> Contraction:
    """Merge runs of nodes without branches into nodes of at most ``piece`` seconds of work."""
    dag = nodes.dag
    groups: list[list[int]] = []
    group_of: dict[int, int] = {}
    filled: list[float] = []
    for node in dag.order:
        size = sum(work[layer] for layer in nodes_of(nodes.members[node]))
        before = dag.predecessors[node]
        ahead = before.bit_length() - 1
        run_on = before.bit_count() == 1 and dag.successors[ahead].bit_count() == 1
        if run_on and filled[group_of[ahead]] + size <= piece:
            group_of[node] = group_of[ahead]
            groups[group_of[node]].append(node)
            filled[group_of[node]] += size
        else:
            group_of[node] = len(groups)
            groups.append([node])
            filled.append(size)
    return _within(nodes, contract(dag, groups))


def _within(nodes: Contraction, smaller: Contraction) -> Contraction:
    """Express a contraction of a contraction in the layers of the first."""
    return Contraction(smaller.dag, tuple(nodes.expand(group) for group in smaller.members))


def list_orders(nodes: Contraction, costs: SetCosts) -> list[Order]:
    """Return a few topological orders that keep each node's layers together.

    Branch after branch (the node that became ready last goes first), all branches side by side
    (the one ready first), and fewest bytes alive behind each node.
    """
    live = _LiveBytes(nodes, costs)
    chosen: list[Callable[[list[int], list[int]], int]] = [
        lambda ready, taken: ready[-1],
        lambda ready, taken: ready[0],
        live.cheapest,
    ]
    orders = []
    for choose in chosen:
        order = _order(nodes, choose)
        if order not in orders:
            orders.append(order)
    return orders


def _order(nodes: Contraction, choose: Callable[[list[int], list[int]], int]) -> Order:
    """Take ready nodes one by one as ``choose`` says; ``ready`` is oldest first."""
    dag = nodes.dag
    waiting = [before.bit_count() for before in dag.predecessors]
    ready = [node for node in range(dag.num_nodes) if not waiting[node]]
    taken: list[int] = []
    while ready:
        node = choose(ready, taken)
        ready.remove(node)
        taken.append(node)
        for target in nodes_of(dag.successors[node]):
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return tuple(layer for node in taken for layer in nodes_of(nodes.members[node]))


class _LiveBytes:
    """Bytes a cut would send behind each node that may come next."""

    def __init__(self, nodes: Contraction, costs: SetCosts) -> None:
        node_of = {
            layer: node for node, group in enumerate(nodes.members) for layer in nodes_of(group)
        }
        self.sizes = costs.sent + costs.sent_back
        self.readers = [{node_of[int(layer)] for layer in row.nonzero()[0]} for row in costs.read]
        self.made: list[list[int]] = [[] for _ in nodes.members]
        self.reads: list[list[int]] = [[] for _ in nodes.members]
        for tensor, layer in enumerate(costs.made.tolist()):
            if layer >= 0:
                self.made[node_of[layer]].append(tensor)
            if not costs.handed_out[tensor]:
                for node in self.readers[tensor]:
                    self.reads[node].append(tensor)

    def cheapest(self, ready: list[int], taken: list[int]) -> int:
        """Return the ready node with the fewest bytes alive after it; ties go to the oldest."""
        gone = set(taken)

        def grown(node: int) -> int:
            made = sum(int(self.sizes[tensor]) for tensor in self.made[node])
            freed = sum(
                int(self.sizes[tensor])
                for tensor in self.reads[node]
                if self.readers[tensor] <= gone | {node}
            )
            return made - freed

        return min(ready, key=lambda node: (grown(node), ready.index(node)))
