"""Backward in two parts: first gradients of inputs, which other ranks wait for, then of weights.

Zero-bubble schedules fill idle time with the second part (Qi et al. 2023, section 2). The autograd
graph of a forward is a spine, the nodes from which an input is reached, with branches that lead
from it to weights alone. The first part runs the spine and records the gradient that arrives at
each node with branches; the second runs those branches from there::

    loss -- Linear2 -- ReLU -- Linear1 -- x        spine: runs in the first part
               |                  |
               W2                 W1               branches: run in the second part

No node runs twice, except a `torch.autograd.Function`, which always computes all its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...capture.torch_defects import NEEDS_INPUT_GRADIENT
from ...core.errors import InvalidInput

COMPILED = "CompiledFunctionBackward"
"""Its kernels may overwrite what a second run would read (torch's donated buffers)."""


@dataclass
class _Branch:
    """Weights reached from a single node of the spine, and the gradients that arrive there.

    Attributes:
        weights: Leaves to accumulate into.
        edges: Gradient edges to start from.
        gradients: The gradient at each edge, recorded while the first part runs.
    """

    weights: list[Tensor]
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


class SplitBackward:
    """The backward of one forward, in two calls.

    Args:
        roots: Gradient edges of the outputs that have gradients.
        gradients: Gradients of those outputs.
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

    def run_input_part(self) -> None:
        """Accumulate gradients of inputs, and of weights reached from several places."""
        order = _topological_order(edge.node for edge in self._roots)
        if any(node.name() == COMPILED for node in order):
            raise InvalidInput(
                "torch.compile makes the backward of what it compiles one operation, which cannot "
                "be split into gradients of inputs and of weights; plan with a schedule that does "
                "not split backwards, such as 1f1b or interleaved_1f1b, or do not compile"
            )
        ends = {get_gradient_edge(leaf).node for leaf in self._inputs}
        spine = _find_spine(ends, order)
        beside = _weights_beside(spine, ends, order)
        # Outputs that no input reaches are branches as a whole: they start at the roots.
        off_spine = [
            (edge, gradient)
            for edge, gradient in zip(self._roots, self._gradients, strict=True)
            if edge.node not in spine
        ]
        from_roots = _reachable_weights([edge.node for edge, _ in off_spine])
        uses: dict[Tensor, int] = {}
        for weights in (*beside.values(), from_roots):
            for weight in weights:
                uses[weight] = uses.get(weight, 0) + 1
        for node, weights in beside.items():
            if node.name() in NEEDS_INPUT_GRADIENT:
                uses.update(dict.fromkeys(weights, 2))  # computed with the input's gradient
        alone = [weight for weight in from_roots if uses[weight] == 1]
        if alone:
            edges, gradients = [edge for edge, _ in off_spine], [g for _, g in off_spine]
            self._branches.append(_Branch(alone, edges, gradients))
        handles = []
        for node, weights in beside.items():
            own = [weight for weight in weights if uses[weight] == 1]
            if own:
                branch = _Branch(own)
                self._branches.append(branch)
                handles.append(node.register_prehook(_recording_hook(branch, node)))
        # A weight used in several places belongs to branches that may share nodes further down,
        # which would then run twice. Autograd sums its gradients correctly in one pass, this one.
        shared = [weight for weight, count in uses.items() if count > 1]
        try:
            if self._inputs or shared:
                torch.autograd.backward(
                    self._roots,
                    self._gradients,
                    inputs=[*self._inputs, *shared],  # visits only what leads to these
                    retain_graph=True,  # the branches still need their saved tensors
                )
        finally:
            for handle in handles:
                handle.remove()
        self._roots, self._gradients, self._inputs = [], [], []

    def run_weight_part(self) -> None:
        """Accumulate gradients of all other weights, and release the graph."""
        while self._branches:
            # Popped one by one, so that each branch's gradients and saved tensors are freed before
            # the next one allocates its own.
            branch = self._branches.pop()
            if branch.edges:
                torch.autograd.backward(branch.edges, branch.gradients, inputs=branch.weights)


def _recording_hook(branch: _Branch, node: Node) -> Any:
    def record(gradients: tuple[Tensor | None, ...]) -> None:
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                branch.edges.append(GradientEdge(node, number))
                branch.gradients.append(gradient)

    return record


def _successors(node: Node) -> Iterator[Node]:
    return (following for following, _ in node.next_functions if following is not None)


def _topological_order(roots: Iterable[Node]) -> list[Node]:
    """Return every node of the graph, each before the nodes it leads to."""
    finished: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        # Depth-first search with an explicit stack: graphs of deep models exceed Python's
        # recursion limit.
        stack = [(root, _successors(root))]
        while stack:
            node, following = stack[-1]
            unseen = next((other for other in following if other not in seen), None)
            if unseen is None:
                finished.append(node)
                stack.pop()
            else:
                seen.add(unseen)
                stack.append((unseen, _successors(unseen)))
    return finished[::-1]


def _find_spine(ends: set[Node], order: Sequence[Node]) -> set[Node]:
    """Return the nodes from which one of the ends is reached, including the ends."""
    spine: set[Node] = set()
    for node in reversed(order):
        if node in ends or any(following in spine for following in _successors(node)):
            spine.add(node)
    return spine


def _weights_beside(
    spine: set[Node], ends: set[Node], order: Sequence[Node]
) -> dict[Node, list[Tensor]]:
    """Return, for each node of the spine, the weights it reaches without following the spine."""
    found = {}
    for node in order:
        if node in spine and node not in ends:
            beside = [following for following in _successors(node) if following not in spine]
            weights = _reachable_weights(beside)
            if weights:
                found[node] = weights
    return found


def _reachable_weights(nodes: Sequence[Node]) -> list[Tensor]:
    """Return the leaves that the given nodes lead to, each once."""
    found: dict[Tensor, None] = {}
    seen = set(nodes)
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # AccumulateGrad nodes alone have one
        if leaf is not None:
            found[leaf] = None
        for following in _successors(node):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found)
