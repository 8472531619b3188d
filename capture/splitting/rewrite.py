"""Rewriting of a program so that each rank computes its part of the layers that are split."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..program.layers import Layers
from ..program.mutation import changed_storages
from ..program.program import VALUE, Program, storages_of
from .find_split import ModelSplit
from .layout import Layout, NodeSplit, Shard, find_weight
from .product_rules import REMOVED, LookUp


@dataclass(frozen=True)
class Exchange:
    """Functions of a rewritten program by which ranks that share a layer exchange values.

    Attributes:
        rank: This rank's number among them.
        degree: How many they are.
        enter: Returns a whole value; in the backward, the sum of its gradients over the ranks.
        take: Returns, for a layout, the function that takes this rank's part of a whole value; in
            the backward it joins the parts' gradients.
        add: Returns the sum of a value over the ranks; gradients pass as they are.
        add_part: Returns, for a layout, the function that returns this rank's part of the sum; in
            the backward it joins the parts' gradients.
        gather: Returns, for a layout, the function that joins the ranks' parts of a value; in the
            backward it takes this rank's part of the gradient.
        gather_entered: As ``gather``, but for a value whose gradients differ by rank: in the
            backward it takes this rank's part of their sum.
        draw_apart: Lets this rank's random numbers differ from those of the others.
        draw_alike: Makes random numbers equal on all ranks again.
    """

    rank: int
    degree: int
    enter: Callable[[Tensor], Tensor]
    take: Callable[[Shard], Callable[[Tensor], Tensor]]
    add: Callable[[Tensor], Tensor]
    add_part: Callable[[Shard], Callable[[Tensor], Tensor]]
    gather: Callable[[Shard], Callable[[Tensor], Tensor]]
    gather_entered: Callable[[Shard], Callable[[Tensor], Tensor]]
    draw_apart: Callable[[], None]
    draw_alike: Callable[[], None]


def take_part(tensor: Tensor, dim: int, parts: tuple[int, ...], rank: int, degree: int) -> Tensor:
    """Return a rank's part of a whole value; see `Shard`."""
    pieces = tensor.split(list(parts), dim) if parts else [tensor]
    own = [piece.chunk(degree, dim)[rank] for piece in pieces]
    return own[0] if len(own) == 1 else torch.cat(own, dim)


def whole_ones(part: Tensor, dim: int, degree: int) -> Tensor:
    """Return ones in the shape of the whole value of a part."""
    sizes = list(part.shape)
    sizes[dim] *= degree
    return torch.ones(sizes, dtype=part.dtype, device=part.device)


def add_bias(total: Tensor, bias: Tensor, behind: int) -> Tensor:
    """Add a bias along the dimension that has ``behind`` others behind it.

    Autocast has made the product of another type than the bias, and the sum has to keep it.
    """
    return total + bias.to(total.dtype).view(-1, *[1] * behind)


def join_parts(held: list[Tensor], layout: Shard) -> Tensor:
    """Return the whole value of which the ranks, in order, hold these parts."""
    if not layout.parts:
        return torch.cat(held, layout.dim)
    sizes = [size // len(held) for size in layout.parts]
    divided = [each.split(sizes, layout.dim) for each in held]
    pieces = [piece for part in zip(*divided, strict=True) for piece in part]
    return torch.cat(pieces, layout.dim)


def rewrite(
    program: Program, layers: Layers, split: ModelSplit, exchanges: Callable[[int], Exchange]
) -> None:
    """Change a program in place to compute a rank's part; ``exchanges`` gives that of a layer.

    Nodes that other stages read stay the ones they were, so that cuts and routes remain valid.
    Weights are divided by the caller.
    """
    made = _Made({key for node in program.graph.nodes for key in changed_storages(node, program)})
    for node in list(program.graph.nodes):
        if (change := split.changes.get(node)) is not None:
            exchange = exchanges(layers.layer_of[node])
            _Rewriting(program, layers, split, exchange, made, node).apply(change)
    program.graph.lint()


@dataclass
class _Made:
    """Nodes made so far.

    Attributes:
        changed: The memory that operations change in place.
        local: Parts that are gathered for other stages.
        inputs: What operations of a stage read instead of a value, by the value, the function
            that makes it and the stage.
    """

    changed: set[int]
    local: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[tuple[fx.Node, str, Any, int], fx.Node] = field(default_factory=dict)


@dataclass
class _Rewriting:
    """Rewriting of one operation and of what it reads."""

    program: Program
    layers: Layers
    split: ModelSplit
    exchange: Exchange
    made: _Made
    node: fx.Node

    @property
    def layer(self) -> int:
        return self.layers.layer_of[self.node]

    @property
    def stage(self) -> int:
        return self.split.stages[self.layer]

    def apply(self, change: NodeSplit) -> None:
        node, graph = self.node, self.program.graph
        with graph.inserting_before(node):
            arguments, keywords = self._arguments(change)
            if change.noise and not change.alike:
                self._draw_whole(change, arguments, keywords)
                return
            if change.draws:
                self._call(self.exchange.draw_apart, ())
            if not change.sums and node not in self.split.gathered:
                node.target, node.args, node.kwargs = self._target(change), arguments, keywords
                if change.call is not None:
                    node.op = "call_function"
                inner = node
            else:
                inner = self._copy(change, arguments, keywords)
        if change.draws:
            with graph.inserting_after(inner):
                self._call(self.exchange.draw_alike, ())
        if inner is node:
            return
        with graph.inserting_before(node):
            self._finish(change, inner)

    def _draw_whole(self, change: NodeSplit, arguments: Any, keywords: Any) -> None:
        """Multiply a part by its part of the whole value's mask, equal on every rank."""
        layout = change.layout
        assert isinstance(layout, Shard)
        degree, rank = self.exchange.degree, self.exchange.rank
        part = arguments[0]
        ones = self._call(whole_ones, (part, layout.dim, degree))
        mask = self._copy(change, (ones, *arguments[1:]), keywords)
        own = self._call(take_part, (mask, layout.dim, layout.parts, rank, degree))
        self._end(operator.mul, (part, own))

    def _finish(self, change: NodeSplit, inner: fx.Node) -> None:
        """Let the original node stand for the value that its readers expect."""
        node, layout = self.node, change.layout
        if not change.sums:
            self._gather(inner)
            return
        add = self.exchange.add
        if isinstance(layout, Shard):
            add = self.exchange.add_part(layout)
        bias = change.bias
        if isinstance(bias, str):
            bias = self._attribute(f"{node.target}.{bias}")
        if bias is None:
            self._end(add, (inner,))
            return
        has_channels = node.op == "call_module" and hasattr(self._module(), "kernel_size")
        behind = node.meta[VALUE].dim() - 2 if has_channels else 0
        if isinstance(layout, Shard):
            bias = self._enter(bias)
        self._end(add_bias, (self._call(add, (inner,)), bias, behind))

    def _end(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Let the node call a function; if other stages read it, gather what that returns."""
        if self.node in self.split.gathered:
            self._gather(self._call(function, arguments))
        else:
            self._become(function, arguments)

    def _gather(self, local: fx.Node) -> None:
        self.made.local[self.node] = local
        self._become(self.exchange.gather(self.split.gathered[self.node]), (local,))

    def _become(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.node.op, self.node.target = "call_function", function
        self.node.args, self.node.kwargs = arguments, {}

    def _module(self) -> Any:
        return self.program.attribute(str(self.node.target))

    def _copy(self, change: NodeSplit, arguments: Any, keywords: Any) -> fx.Node:
        kind = "call_function" if change.call is not None else self.node.op
        made = self.program.graph.create_node(kind, self._target(change), arguments, keywords)
        return self._adopt(made)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
        return self._adopt(self.program.graph.call_function(function, arguments))

    def _adopt(self, made: fx.Node) -> fx.Node:
        made.meta = dict(self.node.meta)
        self.layers.layer_of[made] = self.layer
        return made

    def _attribute(self, name: str) -> fx.Node:
        made = self.program.graph.get_attr(name)
        # A shape only: the weight itself would keep its memory when a rank's part replaces it.
        made.meta = {**self.node.meta, VALUE: self.program.attribute(name).detach().to("meta")}
        return made

    def _target(self, change: NodeSplit) -> Any:
        if isinstance(change.call, LookUp):
            return change.call.of_rank(self.exchange.rank)
        return change.call or self.node.target

    def _arguments(self, change: NodeSplit) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, keywords = list(self.node.args), dict(self.node.kwargs)
        for position, value in change.arguments.items():
            arguments[position] = value
        arguments = [each for each in arguments if each is not REMOVED]
        if self.node.op == "call_module" and change.call is not None:
            module = self._module()
            for name in ("weight",) if change.sums else ("weight", "bias"):
                if getattr(module, name, None) is not None:
                    arguments.append(self._attribute(f"{self.node.target}.{name}"))
        convert = lambda source: self._read(source, change)  # noqa: E731
        return fx.map_arg(tuple(arguments), convert), fx.map_arg(keywords, convert)

    def _read(self, source: fx.Node, change: NodeSplit) -> fx.Node:
        """Return what the rank reads instead of an input."""
        known = self.split.changes.get(source)
        if known is not None and isinstance(known.layout, Shard | list) and self._shares(source):
            return self._read_divided(source, known.layout, change)
        if change.alike or id(find_weight(source, self.program)) in self.split.weights:
            return source
        if source not in change.slices:
            return self._enter(source)
        return self._take(source, change.slices[source])

    def _shares(self, source: fx.Node) -> bool:
        """Return True if a divided value is handed on in parts."""
        runs = self.split.runs
        return runs[self.layers.layer_of[source]] == runs[self.layer]

    def _read_divided(
        self, source: fx.Node, layout: Shard | list[Layout], change: NodeSplit
    ) -> fx.Node:
        is_here = self.split.stages[self.layers.layer_of[source]] == self.stage
        is_gathered = source in self.split.gathered
        local = self.made.local[source] if is_gathered and is_here else source
        if source not in change.whole:
            if is_gathered and not is_here:  # another stage sends it whole
                assert isinstance(layout, Shard)
                return self._take(source, layout)
            return local
        assert isinstance(layout, Shard)
        part = change.slices.get(source)  # gathered, to be divided along another dimension
        if is_gathered and (change.alike or not is_here):
            if part is not None:
                return self._take(source, part)
            return source if change.alike else self._enter(source)
        has_whole_gradient = change.alike or part is not None or not _has_gradient(source)
        kind = "gather" if has_whole_gradient else "gather_entered"
        whole = self._once(kind, layout, source, local)
        return whole if part is None else self._take(source, part, whole)

    def _take(self, source: fx.Node, layout: Shard, whole: fx.Node | None = None) -> fx.Node:
        """Return this rank's part of a value that is whole, or was gathered."""
        whole = source if whole is None else whole
        if self._is_variable(source):
            return self._once("take", layout, source, whole)
        degree, rank = self.exchange.degree, self.exchange.rank
        return self._call(take_part, (whole, layout.dim, layout.parts, rank, degree))

    def _enter(self, source: fx.Node) -> fx.Node:
        """Return a whole value whose gradient is summed over the ranks, made once for a stage."""
        return self._once("enter", None, source, source) if self._is_variable(source) else source

    def _is_variable(self, source: fx.Node) -> bool:
        return _has_gradient(source) and source not in self.layers.constant

    def _once(self, name: str, layout: Shard | None, source: fx.Node, given: fx.Node) -> fx.Node:
        """Return what a function of the exchange makes of a value, one node for a stage."""
        function = getattr(self.exchange, name)
        if layout is not None:
            function = function(layout)
        if not self.made.changed.isdisjoint(storages_of([source])):
            # Between two reads it may be changed in place, which a view made before would miss.
            return self._call(function, (given,))
        key = source, name, layout, self.stage
        if key not in self.made.inputs:
            self.made.inputs[key] = self._call(function, (given,))
        return self.made.inputs[key]


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get(VALUE)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
