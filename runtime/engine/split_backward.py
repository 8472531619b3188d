"""A backward in two parts: first the gradients of inputs, which others wait for, then of weights.

Zero-bubble schedules fill idle time with the second part (Qi et al. 2023, section 2). The graph of
a forward is a spine, the nodes through which an input is reached, with branches that lead from it
to weights alone. The first part runs the spine and keeps the gradient that arrives at each node
with branches; the second runs those branches from there. Neither runs twice, but for a
`torch.autograd.Function`, which computes all its gradients whenever it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Branch:
    """Weights that are reached from one place alone, and the gradients that arrive there.

    Attributes:
        weights: Leaves to accumulate into.
        edges: Where to begin.
        gradients: What arrives there, filled in while the first part runs.
    """

    weights: list[Tensor]
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class SplitBackward:
    """The backward of one forward, in two calls.

    Args:
        roots: Of the outputs that have gradients.
        gradients: Theirs.
        inputs: Leaves whose gradients the first part accumulates in ``.grad``.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        self._roots, self._gradients, self._inputs = list(roots), list(gradients), list(inputs)
        self._branches: list[_Branch] = []

    def of_inputs(self) -> None:
        """Accumulate the gradients of inputs, and of weights used in several places."""
        order = _inputs_last(edge.node for edge in self._roots)
        ends = {get_gradient_edge(leaf).node for leaf in self._inputs}
        spine = _leading_to(ends, order)
        reached = _weights_beside(spine, ends, order)
        uses: dict[Tensor, int] = {}
        for weights in reached.values():
            for weight in weights:
                uses[weight] = uses.get(weight, 0) + 1
        own_roots = [
            (edge, gradient)
            for edge, gradient in zip(self._roots, self._gradients, strict=True)
            if edge.node not in spine
        ]
        beside = _weights_from([edge.node for edge, _ in own_roots], order)
        for weight in beside:
            uses[weight] = uses.get(weight, 0) + 1
        alone = [weight for weight in beside if uses[weight] == 1]
        if alone:
            self._branches.append(
                _Branch(alone, [edge for edge, _ in own_roots], [g for _, g in own_roots])
            )
        handles = []
        for node, weights in reached.items():
            own = [weight for weight in weights if uses[weight] == 1]
            if own:
                branch = _Branch(own)
                self._branches.append(branch)
                handles.append(node.register_prehook(_keeper(branch, node)))
        shared = [weight for weight, count in uses.items() if count > 1]
        wanted = [*self._inputs, *shared]
        try:
            if wanted:
                torch.autograd.backward(
                    self._roots, self._gradients, inputs=wanted, retain_graph=True
                )
        finally:
            for handle in handles:
                handle.remove()
        self._roots, self._gradients, self._inputs = [], [], []

    def of_weights(self) -> None:
        """Accumulate the gradients of all other weights, and let go of the graph."""
        while self._branches:
            branch = self._branches.pop()
            if branch.edges:
                torch.autograd.backward(branch.edges, branch.gradients, inputs=branch.weights)


def _keeper(branch: _Branch, node: Node) -> Any:
    """A hook that keeps what arrives at a node."""

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                branch.edges.append(GradientEdge(node, number))
                branch.gradients.append(gradient)

    return keep


def _next(node: Node) -> Iterator[Node]:
    return (following for following, _ in node.next_functions if following is not None)


def _inputs_last(roots: Iterable[Node]) -> list[Node]:
    """Every node of the graph, after those that lead to it."""
    finished: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, _next(root))]
        while stack:
            node, following = stack[-1]
            unseen = next((other for other in following if other not in seen), None)
            if unseen is None:
                finished.append(node)
                stack.pop()
            else:
                seen.add(unseen)
                stack.append((unseen, _next(unseen)))
    return finished[::-1]


def _leading_to(ends: set[Node], order: Sequence[Node]) -> set[Node]:
    """The nodes from which one of the ends is reached, the ends among them."""
    found: set[Node] = set()
    for node in reversed(order):
        if node in ends or any(following in found for following in _next(node)):
            found.add(node)
    return found


def _weights_beside(
    spine: set[Node], ends: set[Node], order: Sequence[Node]
) -> dict[Node, list[Tensor]]:
    """For each node of the spine the weights it reaches without following the spine."""
    found = {}
    for node in order:
        if node in spine and node not in ends:
            beside = [following for following in _next(node) if following not in spine]
            weights = _weights_from(beside, order)
            if weights:
                found[node] = weights
    return found


def _weights_from(nodes: Sequence[Node], order: Sequence[Node]) -> list[Tensor]:
    """The leaves that nodes off the spine lead to, each once."""
    found: dict[Tensor, None] = {}
    seen = set(nodes)
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[leaf] = None
        for following in _next(node):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found)
