"""Search for the operations of a stage that its ranks can share.

Inputs of the model stay whole on all ranks, and so does what stages of different numbers of ranks
send each other. Inside, products by weights start whole and end divided (by columns, output
channels or heads); what follows is computed in parts as far as rules reach, up to products whose
results are parts of a sum. Of such a sum each rank gets the rows of its own, along the sequence,
and norms, residual sums and dropout treat these by themselves (sequence parallelism, Korthikanti et
al. 2022, "Reducing Activation Recomputation"), until a product needs all rows; where nothing can be
done with rows, each rank gets the whole sum.

Where no rule reaches, rows are gathered, as are parts made in an earlier layer; products that
started in the same layer are computed whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from ..program.cuts import Cut
from ..program.layers import Layers
from ..program.mutation import changed_storages, mutated_inputs
from ..program.program import Program, modules_called, references_of, storages_of
from .layout import (
    NeedsParts,
    NodeCall,
    NodeSplit,
    Shard,
    Unsplittable,
    WeightLayouts,
    base_name,
    is_transpose,
    shape,
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
        stages: The stage of each layer.
        runs: The run of layers, of one stage or several, in which values are handed on in parts.
        outputs_in_parts: Whether the model's outputs may stay in parts.
        changes: How each operation differs on a rank; others are the same on all.
        gathered: Divided values that are needed whole outside.
        weights: Divided parameters and buffers by ``id``.
        reasons: Why products stay whole, by layer and name of the operation.
    """

    degrees: Sequence[int]
    stages: Sequence[int]
    runs: Sequence[int]
    outputs_in_parts: bool = False
    changes: dict[fx.Node, NodeSplit] = field(default_factory=dict)
    gathered: dict[fx.Node, Shard] = field(default_factory=dict)
    weights: dict[int, DividedWeight] = field(default_factory=dict)
    reasons: dict[tuple[int, str], str] = field(default_factory=dict)


Traced = tuple[Program, Layers, Sequence[Cut]]
"""A program, its layers and the values between them."""


def find_split(
    traced: Sequence[Traced], degrees: Sequence[int], stages: Sequence[int] = ()
) -> ModelSplit:
    """Find how layers can be shared by as many ranks as ``degrees`` says for each.

    ``stages`` is the stage of each layer; without it, the model is one. Several programs of one
    model, as for training and evaluation, divide the same weights. A weight is divided only if all
    operations that read it agree on how.
    """
    stages = stages or [0] * len(degrees)
    # From the most that can be handed on in parts to what always works.
    tries = [(stages, True), (stages, False)]
    if len(set(degrees)) == 1:
        tries = [([0] * len(degrees), True), ([0] * len(degrees), False), *tries]
    for runs, in_parts in tries:
        split = _find_split(traced, ModelSplit(degrees, stages, runs, in_parts))
        if _agree(traced, split):
            break
    return split


def is_local(node: fx.Node, split: ModelSplit) -> bool:
    """Return True if ranks hold parts of a value, and other stages get them."""
    change = split.changes.get(node)
    return change is not None and change.layout is not None and node not in split.gathered


def list_outputs(program: Program, split: ModelSplit) -> list[Shard | None]:
    """Return the layout of each of the model's outputs, and `None` for what is whole."""
    found = []
    for node in program.flat_outputs:
        layout = split.changes[node].layout if is_local(node, split) else None
        found.append(layout if isinstance(layout, Shard) else None)
    return found


def _agree(traced: Sequence[Traced], split: ModelSplit) -> bool:
    """Return True if all programs hand on the same parts of values, between stages and at last."""
    ends = [at for at, pair in enumerate(pairwise(split.stages)) if pair[0] != pair[1]]

    def layouts(program: Program, cuts: Sequence[Cut]) -> list[object]:
        between = [node for end in ends for node in cuts[end].nodes]
        made = [split.changes[node].layout if is_local(node, split) else None for node in between]
        return [*made, *list_outputs(program, split)]

    found = [layouts(program, cuts) for program, _, cuts in traced]
    return all(each == found[0] for each in found)


def _find_split(traced: Sequence[Traced], empty: ModelSplit) -> ModelSplit:
    """Find the operations that change, for the runs of layers given."""
    degrees, runs = empty.degrees, empty.runs
    layer_of: dict[fx.Node, int] = {}
    nodes: dict[tuple[int, int], list[fx.Node]] = {}
    readers: dict[int, set[fx.Node]] = {}
    for number, (program, layers, _) in enumerate(traced):
        for node in program.graph.nodes:
            layer = layers.layer_of.get(node, -1)
            if layer >= 0 and degrees[layer] > 1:
                nodes.setdefault((number, runs[layer]), []).append(node)
                layer_of[node] = layer
        for tensor, found in _find_readers(program).items():
            readers.setdefault(tensor, set()).update(found)
    whole: dict[fx.Node, str] = {}
    searches: dict[tuple[int, int], _RunSearch] = {}
    waiting = list(nodes)
    while waiting:
        for key in waiting:
            program, degree = traced[key[0]][0], degrees[layer_of[nodes[key][0]]]
            keeps_outputs = empty.outputs_in_parts and key[1] == runs[-1]
            searches[key] = _RunSearch(program, nodes[key], layer_of, degree, whole, keeps_outputs)
        split = replace(empty, changes={}, gathered={}, weights={})
        conflicts = _collect(searches.values(), readers, split)
        whole.update(dict.fromkeys(conflicts, "shares a weight that is read whole elsewhere"))
        waiting = [key for key, own in nodes.items() if not conflicts.isdisjoint(own)]
    split = replace(empty, changes={}, gathered={}, weights={})
    _collect(searches.values(), readers, split)
    split.reasons = {(layer_of[node], node.name): reason for node, reason in whole.items()}
    return split


def _collect(
    searches: Iterable[_RunSearch], readers: dict[int, set[fx.Node]], split: ModelSplit
) -> set[fx.Node]:
    """Join the runs' splits; return the starts of those that disagree about a weight."""
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


class _RunSearch:
    """The split of a run of layers; products in ``whole`` start none, and others join them."""

    def __init__(
        self,
        program: Program,
        nodes: Sequence[fx.Node],
        layer_of: dict[fx.Node, int],
        degree: int,
        whole: dict[fx.Node, str],
        keeps_outputs: bool,
    ) -> None:
        self._program, self._nodes, self._degree, self._whole = program, nodes, degree, whole
        self._keeps_outputs = keeps_outputs
        self._changed = {key for each in nodes for key in changed_storages(each, program)}
        self._layer_of, self._at = layer_of, {node: at for at, node in enumerate(nodes)}
        self._parts: dict[fx.Node, tuple[int, ...]] = {}
        self._row_parts: dict[fx.Node, tuple[int, ...]] = {}  # of the rows of sums
        self._added: set[fx.Node] = set()  # products of whose sum every rank gets all
        self._layouts: dict[fx.Node, Any] = {}
        self._starts: dict[fx.Node, set[fx.Node]] = {}
        self._sums: dict[fx.Node, set[fx.Node]] = {}  # of which values are rows, or made of them
        self._needs: dict[fx.Node, tuple[WeightLayouts, set[fx.Node]]] = {}
        self._layout_of: dict[int, Shard] = {}  # of weights, by id
        self.changes: dict[fx.Node, NodeSplit] = {}
        at = 0
        while at < len(nodes):
            at = self._visit(nodes[at])
            if at == len(nodes):
                at = self._add_what_nothing_divides()
        self.divided = self._divide_weights()
        self.gathered = {
            node: layout
            for node, layout in self._layouts.items()
            if isinstance(layout, Shard) and self._is_read_outside(node)
        }

    def _is_read_outside(self, node: fx.Node) -> bool:
        return any(
            user not in self._at and not (user.op == "output" and self._keeps_outputs)
            for user in node.users
        )

    def _visit(self, node: fx.Node) -> int:
        """Split an operation, if it can be; return the position of the next one to visit."""
        following, gathered = self._at[node] + 1, set[fx.Node]()
        while True:
            reads = [
                source
                for source in node.all_input_nodes
                if self._layouts.get(source) and source not in gathered
            ]
            call = self._call(node, reads)
            if not reads and not call.may_start:
                if node.op == "call_module" and find_rule(call) is None:
                    self._whole.setdefault(node, f"{self._label(node)} is called whole")
                break
            starts: set[fx.Node] = set().union(*(self._starts[source] for source in reads))
            try:
                self._split(call, starts or {node}, reads, gathered)
            except (NeedsParts, Unsplittable) as reason:
                if not reads:  # it starts nothing, and nothing depends on it
                    self._whole.setdefault(node, f"{self._label(node)} {reason}")
                    break
                if isinstance(reason, NeedsParts) and (
                    sums := self._sums_without_parts(reads, reason.parts)
                ):
                    self._row_parts.update(dict.fromkeys(sums, reason.parts))
                    return self._rewind(sums)
                apart = self._reads_to_gather(node, reads, starts)
                if not apart:
                    return self._give_up(node, starts, reason)
                if any(isinstance(self._layouts[source], list) for source in apart):
                    return self._undo(apart, f"{self._label(node)} reads several results")
                if self._is_changed_in_place(node, apart):
                    return self._undo(apart, f"{self._label(node)} changes a value in place")
                gathered.update(apart)
            else:
                return following
        if gathered:
            self.changes[node] = NodeSplit(None, whole=gathered, alike=True)
        return following

    def _is_changed_in_place(self, node: fx.Node, values: Sequence[fx.Node]) -> bool:
        """Return True if an operation changes values, or makes views of them that others change."""
        if not set(values).isdisjoint(mutated_inputs(node, self._program)):
            return True
        viewed = storages_of(values) & storages_of([node])
        return not viewed.isdisjoint(self._changed)

    def _call(self, node: fx.Node, reads: Sequence[fx.Node]) -> NodeCall:
        call = NodeCall(
            node,
            self._program,
            self._degree,
            {source: self._layouts[source] for source in reads},
            WeightLayouts(),
            self._parts.get(node, ()),
        )
        call.may_start = not reads and node not in self._whole and may_start(call)
        return call

    def _sums_without_parts(self, reads: Sequence[fx.Node], parts: tuple[int, ...]) -> set[fx.Node]:
        """Return the products whose sums these rows are of, if all can be divided by these parts.

        A product of flat rows, all sequences behind each other, is divided sequence by sequence.
        """
        sums: set[fx.Node] = set().union(*(self._sums[source] for source in reads))
        fits = all(shape(each)[-2] == sum(parts) for each in sums)
        return sums if fits and sums.isdisjoint(self._row_parts) else set()

    def _reads_to_gather(
        self, node: fx.Node, reads: Sequence[fx.Node], starts: set[fx.Node]
    ) -> list[fx.Node]:
        """Return divided values that are better gathered than the products behind them given up."""
        if rows := [source for source in reads if self._sums[source]]:
            return rows
        is_local = all(self._layer_of[start] == self._layer_of[node] for start in starts)
        return [] if is_local else list(reads)

    def _give_up(self, node: fx.Node, starts: set[fx.Node], reason: Exception) -> int:
        """Let products start in another way, or not at all; return the position of the first."""
        if not isinstance(reason, NeedsParts):
            blame = reason.blame if isinstance(reason, Unsplittable) else ()
            starts = set().union(*(self._starts.get(each, ()) for each in blame)) or starts
        elif not any(each in self._parts for each in starts):
            self._parts.update(dict.fromkeys(starts, reason.parts))
            return self._rewind(starts)
        else:
            reason = Unsplittable("takes a divided dimension apart in two ways")
        for start in starts:
            self._whole[start] = f"{self._label(node)} {reason}"
            self._parts.pop(start, None)
        return self._rewind(starts)

    def _undo(self, values: Sequence[fx.Node], reason: str) -> int:
        """Do without what was divided for values that cannot be gathered."""
        sums: set[fx.Node] = set().union(*(self._sums[each] for each in values))
        starts: set[fx.Node] = (
            set() if sums else set().union(*(self._starts[each] for each in values))
        )
        self._added |= sums
        self._whole.update(dict.fromkeys(starts, reason))
        return self._rewind(sums | starts)

    def _add_what_nothing_divides(self) -> int:
        """Have sums added whose rows are only gathered; return the next position to visit."""
        useless = {
            node
            for node, change in self.changes.items()
            if change.sums and change.layout is not None
            if all(
                user not in self._at or node in self.changes[user].whole
                for user in node.users
            )
        }  # fmt: skip
        self._added |= useless
        return self._rewind(useless) if useless else len(self._nodes)

    def _rewind(self, to: Iterable[fx.Node]) -> int:
        """Forget what was found from the first of some operations on; return its position."""
        first = min(self._at[node] for node in to)
        for node in self._nodes[first:]:
            for found in (self._layouts, self._starts, self._sums, self._needs, self.changes):
                found.pop(node, None)
        self._layout_of = {
            key: layout for need, _ in self._needs.values() for key, layout in need.layouts.items()
        }
        return first

    def _split(
        self,
        call: NodeCall,
        starts: set[fx.Node],
        reads: Sequence[fx.Node],
        gathered: set[fx.Node],
    ) -> None:
        rule = find_rule(call)
        if rule is None:
            raise Unsplittable("has no rule")
        node, change = call.node, rule(call)
        if isinstance(change.layout, list) and self._is_read_outside(node):
            raise Unsplittable("has several results that are read outside")
        needed = call.weights.layouts
        call.check_inputs()
        sums: set[fx.Node] = set().union(*(self._sums[source] for source in reads))
        if sums:  # no product has to change for it: rows can be gathered
            starts = {node}
        if reads and starts == {node} and node in self._whole and needed:
            # It made rows divide a weight that others read whole.
            raise Unsplittable(self._whole[node])
        if any(self._layout_of.get(key, layout) != layout for key, layout in needed.items()):
            raise Unsplittable("reads a weight that is divided in another way elsewhere")
        self._layout_of.update(needed)
        self._needs[node] = call.weights, starts
        if change.by_rows and (rows := self._rows_of(node)) is not None:
            change.layout, starts, sums = rows, set(), {node}
        change.whole = gathered
        self.changes[node], self._starts[node], self._sums[node] = change, starts, sums
        if change.layout is not None:
            self._layouts[node] = change.layout

    def _rows_of(self, node: fx.Node) -> Shard | None:
        """Return the layout of a sum of which each rank gets its rows."""
        sizes, parts = shape(node), self._row_parts.get(node, ())
        divided = parts or sizes[-2:-1]
        if node in self._added or not divided or any(size % self._degree for size in divided):
            return None
        return Shard(len(sizes) - 2, parts)

    def _divide_weights(self) -> dict[int, DividedWeight]:
        divided: dict[int, DividedWeight] = {}
        for node, (need, starts) in self._needs.items():
            for key, layout in need.layouts.items():
                own = DividedWeight(need.tensors[key], layout, self._degree)
                known = divided.setdefault(key, own)
                known.readers.add(node)
                known.starts |= starts
        return divided

    def _label(self, node: fx.Node) -> str:
        """Return an operation's kind: without numbers, so that equal blocks give equal reasons."""
        if node.op == "call_module":
            return type(self._program.attribute(str(node.target))).__name__
        return base_name(node)
