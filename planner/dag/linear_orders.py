"""Heuristic linear orders of a layer graph that has too many cuts to enumerate."""

from __future__ import annotations

from collections.abc import Callable

from ..cost.chain import Order
from .downsets import Contraction, nodes_of
from .set_costs import SetCosts


def linear_orders(nodes: Contraction, costs: SetCosts) -> list[Order]:
    """Return a few topological orders that keep each node's layers together.

    Branch after branch (the node that became ready last goes first), all branches side by side
    (the one ready first), and fewest bytes alive behind each node.
    """
    live = _Live(nodes, costs)
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


class _Live:
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
