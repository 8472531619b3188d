"""Search for the operations of each layer that the ranks of a stage can share.

Every layer's inputs and outputs stay whole on all ranks, so that a model may be cut anywhere.
Inside, products by weights start whole and end divided (by columns, output channels or heads); what
follows is computed in parts as far as rules reach, up to products whose results are parts of a sum,
which ranks add. Where no rule reaches, the products that started are computed whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ..program.layers import Layers
from ..program.program import Program, modules_called, references_of
from .layout import (
    NeedsParts,
    NodeCall,
    NodeSplit,
    Shard,
    Unsplittable,
    WeightLayouts,
    base_name,
    is_transpose,
)
from .rules import find_rule, may_start


@dataclass
class DividedWeight:
    """A parameter or buffer of which each of ``degree`` ranks holds a part.

    ``readers`` are the operations that read the part, ``starts`` the products that began the splits
    they belong to.
    """

    tensor: Tensor
    layout: Shard
    degree: int
    readers: set[fx.Node] = field(default_factory=set)
    starts: set[fx.Node] = field(default_factory=set)


@dataclass
class ModelSplit:
    """Split of a model's layers over the ranks that share them.

    Attributes:
        degrees: Ranks that share each layer.
        changes: How each operation differs on a rank; others are the same on all.
        gathered: Divided values that other layers need whole.
        weights: Divided parameters and buffers by ``id``.
        reasons: Why products stay whole, by layer and name of the operation.
    """

    degrees: Sequence[int]
    changes: dict[fx.Node, NodeSplit] = field(default_factory=dict)
    gathered: dict[fx.Node, Shard] = field(default_factory=dict)
    weights: dict[int, DividedWeight] = field(default_factory=dict)
    reasons: dict[tuple[int, str], str] = field(default_factory=dict)


Traced = tuple[Program, Layers]
"""A program and its layers."""


def find_split(traced: Sequence[Traced], degrees: Sequence[int]) -> ModelSplit:
    """Find how layers can be shared by as many ranks as ``degrees`` says for each.

    Several programs of one model, as for training and evaluation, divide the same weights. A weight
    is divided only if all operations that read it agree on how.
    """
    layer_of: dict[fx.Node, int] = {}
    nodes: dict[tuple[int, int], list[fx.Node]] = {}
    readers: dict[int, set[fx.Node]] = {}
    for number, (program, layers) in enumerate(traced):
        for node in program.graph.nodes:
            layer = layers.layer_of.get(node, -1)
            if layer >= 0 and degrees[layer] > 1:
                nodes.setdefault((number, layer), []).append(node)
                layer_of[node] = layer
        for tensor, found in _find_readers(program).items():
            readers.setdefault(tensor, set()).update(found)
    whole: dict[fx.Node, str] = {}
    searches: dict[tuple[int, int], _LayerSearch] = {}
    waiting = list(nodes)
    while waiting:
        for key in waiting:
            program, degree = traced[key[0]][0], degrees[key[1]]
            searches[key] = _LayerSearch(program, nodes[key], degree, whole)
        split = ModelSplit(degrees)
        conflicts = _collect(searches.values(), readers, split)
        whole.update(dict.fromkeys(conflicts, "shares a weight that is read whole elsewhere"))
        waiting = [key for key, own in nodes.items() if not conflicts.isdisjoint(own)]
    split = ModelSplit(degrees)
    _collect(searches.values(), readers, split)
    split.reasons = {(layer_of[node], node.name): reason for node, reason in whole.items()}
    return split


def _collect(
    searches: Iterable[_LayerSearch], readers: dict[int, set[fx.Node]], split: ModelSplit
) -> set[fx.Node]:
    """Join the layers' splits; return the starts of those that disagree about a weight."""
    conflicts: set[fx.Node] = set()
    for search in searches:
        split.changes.update(search.changes)
        split.gathered.update(search.gathered)
        for key, weight in search.divided.items():
            known = split.weights.setdefault(key, weight)
            if known is weight:
                continue
            if (known.layout, known.degree) != (weight.layout, weight.degree):
                conflicts |= known.starts | weight.starts
            merged = known.readers | weight.readers, known.starts | weight.starts
            split.weights[key] = DividedWeight(weight.tensor, weight.layout, weight.degree, *merged)
    for key, weight in split.weights.items():
        if readers.get(key, set()) - weight.readers:
            conflicts |= weight.starts
    return conflicts


def _find_readers(program: Program) -> dict[int, set[fx.Node]]:
    """Return the operations that read each parameter or buffer, by the tensor's ``id``."""
    found: dict[int, set[fx.Node]] = {}
    for node in program.graph.nodes:
        tensors: list[Any] = [program.attribute(name) for name in references_of(node, program)]
        for module in modules_called(node, program):
            tensors += [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            found.setdefault(id(tensor), set()).add(node)
        if node.op == "get_attr":
            value = program.attribute(str(node.target))
            if isinstance(value, Tensor):
                found.setdefault(id(value), set()).update(_final_users(node))
    return found


def _final_users(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _final_users(user) if is_transpose(user) else {user}
    return found


class _LayerSearch:
    """The split of one layer; products in ``whole`` start none, and others are added to it."""

    def __init__(
        self,
        program: Program,
        nodes: Sequence[fx.Node],
        degree: int,
        whole: dict[fx.Node, str],
    ) -> None:
        self._program, self._nodes, self._degree, self._whole = program, nodes, degree, whole
        self._own = set(nodes)
        self._parts: dict[fx.Node, tuple[int, ...]] = {}
        while not self._propagate():
            pass
        self.gathered = {
            node: layout
            for node, layout in self._layouts.items()
            if isinstance(layout, Shard) and self._is_read_outside(node)
        }

    def _is_read_outside(self, node: fx.Node) -> bool:
        return any(user not in self._own for user in node.users)

    def _propagate(self) -> bool:
        """Propagate layouts through the layer; return False if products had to be given up."""
        self._layouts: dict[fx.Node, Any] = {}
        self._starts: dict[fx.Node, set[fx.Node]] = {}
        self.changes: dict[fx.Node, NodeSplit] = {}
        self.divided: dict[int, DividedWeight] = {}
        for node in self._nodes:
            reads = [source for source in node.all_input_nodes if self._layouts.get(source)]
            starts: set[fx.Node] = set().union(*(self._starts[source] for source in reads))
            call = NodeCall(
                node,
                self._program,
                self._degree,
                self._layouts,
                WeightLayouts(),
                self._parts.get(node, ()),
            )
            call.may_start = not reads and node not in self._whole and may_start(call)
            if not reads and not call.may_start:
                continue
            try:
                self._split(call, starts or {node})
            except NeedsParts as wanted:
                if any(each in self._parts for each in starts):
                    self._give_up(starts, node, "takes a divided dimension apart in two ways")
                else:
                    self._parts.update(dict.fromkeys(starts, wanted.parts))
                return False
            except Unsplittable as reason:
                if not reads:  # it starts nothing, and nothing depends on it
                    self._whole.setdefault(node, f"{self._label(node)} {reason}")
                    continue
                blamed = [self._starts[each] for each in reason.blame if each in self._starts]
                self._give_up(set().union(*blamed) or starts, node, str(reason))
                return False
        return True

    def _split(self, call: NodeCall, starts: set[fx.Node]) -> None:
        rule = find_rule(call)
        if rule is None:
            raise Unsplittable("has no rule")
        change = rule(call)
        if isinstance(change.layout, list) and self._is_read_outside(call.node):
            raise Unsplittable("has several results that other layers read")
        self.changes[call.node] = change
        self._starts[call.node] = starts
        if change.layout is not None:
            self._layouts[call.node] = change.layout
        for key, layout in call.weights.layouts.items():
            own = DividedWeight(
                call.weights.tensors[key], layout, self._degree, {call.node}, set(starts)
            )
            known = self.divided.setdefault(key, own)
            if known.layout != layout:
                raise Unsplittable("reads a weight that is divided in another way elsewhere")
            known.readers.add(call.node)
            known.starts |= starts

    def _give_up(self, starts: set[fx.Node], node: fx.Node, reason: str) -> None:
        for start in starts:
            self._whole[start] = f"{self._label(node)} {reason}"
            self._parts.pop(start, None)

    def _label(self, node: fx.Node) -> str:
        """Return an operation's kind: without numbers, so that equal blocks give equal reasons."""
        if node.op == "call_module":
            return type(self._program.attribute(str(node.target))).__name__
        return base_name(node)
