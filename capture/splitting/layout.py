"""Layouts of values over the ranks that share a stage's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from ..program.program import Program, value_of


@dataclass(frozen=True)
class Shard:
    """A value of which each rank holds an equal part along one dimension.

    With ``parts``, sizes that add up to the dimension's, each part is divided by itself: a rank
    holds its piece of every part, one behind the other, as for fused queries, keys and values.
    """

    dim: int
    parts: tuple[int, ...] = ()

    def at(self, dim: int) -> Shard:
        """Return the layout of the same pieces along another dimension."""
        return Shard(dim, self.parts)


Layout = Shard | None
"""`None` for a value that every rank holds whole."""


class Unsplittable(Exception):
    """An operation has no rule for the layouts of its inputs, or of those to ``blame`` alone."""

    def __init__(self, reason: str, blame: Sequence[fx.Node] = ()) -> None:
        super().__init__(reason)
        self.blame = tuple(blame)


class NeedsParts(Exception):
    """A dimension must be divided part by part, of these sizes, for an operation to be split."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        super().__init__(parts)
        self.parts = parts


@dataclass
class NodeSplit:
    """Difference of an operation on a rank that holds parts of its values.

    Attributes:
        layout: Layout of its result; a list for an operation with several results.
        arguments: Arguments that change, by position.
        slices: Whole inputs of which the rank reads its part.
        call: Function called instead, with the arguments after these changes.
        sums: Whether ranks' results are parts of a sum. With a ``layout``, each rank gets its part
            of the sum, else all of it.
        by_rows: Whether the sum may be divided along its last dimension but one.
        bias: Added once to the sum.
        whole: Divided inputs that are gathered first.
        alike: Whether every rank computes the whole value, from gathered inputs.
        noise: Whether it is dropout, of which every rank draws the whole mask and takes its part.
        draws: Whether each rank draws random numbers for its own part, as in attention.
    """

    layout: Layout | list[Layout]
    arguments: dict[int, Any] = field(default_factory=dict)
    slices: dict[fx.Node, Shard] = field(default_factory=dict)
    call: Callable[..., Any] | None = None
    sums: bool = False
    by_rows: bool = False
    bias: fx.Node | str | None = None
    whole: set[fx.Node] = field(default_factory=set)
    alike: bool = False
    noise: bool = False
    draws: bool = False


@dataclass
class WeightLayouts:
    """The layouts that operations need of parameters and buffers, by ``id`` of the tensor.

    A tensor that is read in two layouts, `None` among them, cannot be divided.
    """

    tensors: dict[int, Tensor] = field(default_factory=dict)
    layouts: dict[int, Shard] = field(default_factory=dict)

    def divide(self, tensor: Tensor, layout: Shard, degree: int) -> None:
        """Note the layout that an operation needs."""
        check_divisible(tensor.shape[layout.dim], layout.parts, degree)
        if self.layouts.setdefault(id(tensor), layout) != layout:
            raise Unsplittable("reads a weight that is divided in another way elsewhere")
        self.tensors[id(tensor)] = tensor


def check_divisible(size: int, parts: Sequence[int], degree: int) -> None:
    for each in parts or (size,):
        if each % degree:
            raise Unsplittable(f"has {each} to be divided by {degree}")


@dataclass
class NodeCall:
    """One operation, with what a rule needs to know of it."""

    node: fx.Node
    program: Program
    degree: int
    layouts: dict[fx.Node, Any]
    weights: WeightLayouts
    parts: tuple[int, ...] = ()
    """Sizes that its output must be divided by, if it starts a split."""
    may_start: bool = True
    """Whether its inputs may be whole and its output divided."""
    reads_in_parts: int = 0
    """Arguments that are divided weights, as counted by `divide`."""
    considered: set[fx.Node] = field(default_factory=set)
    """Inputs whose layouts the rule has asked for."""

    @property
    def module(self) -> nn.Module:
        found: nn.Module = self.program.attribute(str(self.node.target))
        return found

    def argument(self, position: int, name: str = "", default: Any = None) -> Any:
        """Return an argument, given by position or by name."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def layout(self, value: Any) -> Layout:
        if not isinstance(value, fx.Node):
            return None
        self.considered.add(value)
        found: Layout = self.layouts.get(value)
        return found

    def divide(self, value: Any, layout: Shard) -> None:
        """Have a weight divided; ``value`` reads it, possibly transposed."""
        while isinstance(value, fx.Node) and is_transpose(value):
            dims: Any = value.args[1:3]
            first, second = (dim % len(shape(value)) for dim in dims)
            swapped = {first: second, second: first}
            layout = layout.at(swapped.get(layout.dim, layout.dim))
            value = value.args[0]
        tensor = find_weight(value, self.program) if isinstance(value, fx.Node) else None
        if tensor is None:
            raise Unsplittable("multiplies by what is not a weight")
        self.weights.divide(tensor, layout, self.degree)
        self.reads_in_parts += 1

    def holds_weight(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and find_weight(value, self.program) is not None

    def check_start(self) -> None:
        """Raise `Unsplittable` if the operation's inputs are whole and its output has to be."""
        if not self.may_start:
            raise Unsplittable("starts no split")

    def divide_own(self, name: str, layout: Shard) -> None:
        """Have a parameter or buffer of the module that is called divided."""
        tensor = getattr(self.module, name, None)
        if tensor is not None:
            if not is_registered(self.module, name):
                raise Unsplittable(f"has a {name} that is no parameter")
            self.weights.divide(tensor, layout, self.degree)

    def check_inputs(self) -> None:
        """Raise `Unsplittable` for a divided input, or a reading of a weight, beyond the rule's."""
        if forgotten := [each for each in self.layouts if each not in self.considered]:
            raise Unsplittable("reads a divided value in a place that has to be whole", forgotten)
        given: list[fx.Node] = []
        fx.node.map_aggregate(
            (self.node.args, self.node.kwargs),
            lambda each: given.append(each) if isinstance(each, fx.Node) else None,
        )
        held = [
            each for each in given if id(find_weight(each, self.program)) in self.weights.tensors
        ]
        if len(held) != self.reads_in_parts:
            raise Unsplittable("reads a weight whole and in parts")


def find_weight(node: fx.Node, program: Program) -> Tensor | None:
    """Return the parameter or buffer that a node reads, also through transposes."""
    while is_transpose(node):
        node = node.all_input_nodes[0]
    if node.op != "get_attr":
        return None
    path, _, name = str(node.target).rpartition(".")
    owner = program.attribute(path) if path else program.model
    found = program.attribute(str(node.target))
    return found if isinstance(found, Tensor) and is_registered(owner, name) else None


def is_registered(module: nn.Module, name: str) -> bool:
    """Return True for a parameter or buffer, False for a tensor that is a plain attribute."""
    return name in module._parameters or name in module._buffers


def is_transpose(node: fx.Node) -> bool:
    return node.op == "call_function" and base_name(node) == "transpose"


def base_name(node: fx.Node) -> str:
    """Return an operator's name without namespace and overload, such as ``add`` or ``add_``."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the whole value that a node produces."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        raise Unsplittable("produces no single tensor")
    return tuple(value.shape)
