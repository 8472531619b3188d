"""Serialization of a traced model as data that can be run elsewhere with other weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...core.graph.arguments import Argument, Element, InputReference, NodeReference, StateReference
from ...core.graph.graph import LeafModule, NotRebuildable, Operation, Region
from ...core.graph.tensors import (
    ELEMENT_SIZE_BYTES,
    RANDN_DTYPES,
    Sample,
    SampleTensor,
    StateTensor,
)
from ..program.layers import Layers
from ..program.program import Program, find_module, path_of, tensors_of, value_of
from ..sample import dtype_name, tensor_spec
from .fills import choose_fill
from .leaf_modules import describe_leaf, iterate_leaves, run_on_meta
from .operations import (
    NotSerializable,
    allowed_target,
    is_check,
    to_argument,
    to_keywords,
    write_region,
)

MAX_REASONS = 20
"""Most reasons listed why a graph cannot be rebuilt."""

PathToValue = tuple[str | int, ...]


@dataclass
class PortableGraph:
    """The parts of a `core.graph.graph.Graph` that describe how to run it."""

    operations: list[Operation] = field(default_factory=list)
    modules: dict[str, LeafModule] = field(default_factory=dict)
    state: dict[str, StateTensor] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    returns: list[Argument] = field(default_factory=list)
    output_paths: tuple[PathToValue, ...] = ()
    sample: Sample | None = None
    refusals: list[NotRebuildable] = field(default_factory=list)


def write_portable_graph(program: Program, layers: Layers) -> PortableGraph:
    """Serialize every operation of a traced model with its arguments, and the model's state.

    What cannot be serialized is listed in ``refusals``; the graph is then not rebuildable.
    """
    return _Writer(program, layers).write()


class _Writer:
    """Single pass over the graph that maps every node to a reference."""

    def __init__(self, program: Program, layers: Layers) -> None:
        self._program, self._layers = program, layers
        self._layer_of = _with_constants(program, layers)
        self._found = PortableGraph()
        self._names = {name for names, _, _ in iterate_state(program.model) for name in names}
        self._references: dict[fx.Node, Element] = {
            node: InputReference(input=name)
            for node, name in zip(program.inputs, program.structure.names, strict=True)
        }

    def write(self) -> PortableGraph:
        found = self._found
        for names, tensor, kind in iterate_state(self._program.model):
            self._attempt(None, lambda n=names, t=tensor, k=kind: self._add_state(n, t, k))
        for node in self._program.graph.nodes:
            if node.op == "get_attr":
                self._attempt(node, lambda n=node: self._refer_to_state(n))
            elif node in self._layer_of and not is_check(node):
                self._references[node] = NodeReference(node=node.name)
                self._operation(node)
        self._attempt(None, self._end)
        return found

    def _attempt(self, node: fx.Node | None, write: Any) -> None:
        """Call ``write`` and record the reason if it fails."""
        # Go on after a failure: the report names several reasons, and the operations are listed
        # in the document even if the graph cannot be rebuilt.
        try:
            write()
        except (NotSerializable, ValidationError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            if len(self._found.refusals) < MAX_REASONS:
                layer = None if node is None else self._layer_of.get(node)
                self._found.refusals.append(
                    NotRebuildable(
                        operation="" if node is None else node.name,
                        layer="" if layer is None else self._layers.names[layer],
                        reason=reason,
                    )
                )

    def _add_state(self, names: tuple[str, ...], tensor: Tensor, kind: Any) -> None:
        if dtype_name(tensor.dtype) not in ELEMENT_SIZE_BYTES:
            raise NotSerializable(f"{kind} {names[0]!r} of dtype {tensor.dtype}")
        if tensor.layout is not torch.strided:
            raise NotSerializable(f"{kind} {names[0]!r} of layout {tensor.layout}")
        self._found.state[names[0]] = StateTensor(
            names=names,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            kind=kind,
            requires_grad=tensor.requires_grad,
            strides=None if tensor.is_contiguous() else tensor.stride(),
            persistent=_is_persistent(self._program.model, names[0]),
            fill=None if kind == "parameter" else choose_fill(names[0], tensor),
        )

    def _refer_to_state(self, node: fx.Node) -> None:
        name = str(node.target)
        value = self._program.attribute(name)
        if not isinstance(value, Tensor):
            return  # the body of a region, written where it is called
        if name not in self._names and name not in self._found.state:
            self._add_state((name,), value, "constant")
        self._references[node] = StateReference(state=name)

    def _operation(self, node: fx.Node) -> None:
        kind = "module" if node.op == "call_module" else "function"
        target = _target(node)
        arguments: tuple[Argument, ...] = ()
        keywords: dict[str, Argument] = {}

        def write() -> None:
            nonlocal kind, target, arguments, keywords
            if node.op == "call_module":
                target, given = self._leading_up_to(node, target)
                self._add_module(target)
                if given is not None:
                    arguments = (given,)
                    return
            elif node.op == "call_method":
                raise NotSerializable(f"a call of the method {target!r}")
            else:
                found = write_region(node, self._program, self._layer_of[node])
                if found is not None:
                    kind, target = "region", found[0].name
                    arguments = self._values(found[1])
                    self._found.regions.append(found[0])
                    return
                target = allowed_target(node)
            arguments = self._values(node.args)
            keywords = to_keywords(node, self._references.__getitem__)

        self._attempt(node, write)
        self._found.operations.append(
            Operation(
                name=node.name,
                target=target,
                kind=kind,
                inputs=tuple(source.name for source in node.all_input_nodes),
                outputs=tuple(tensor_spec(node.name, item) for item in tensors_of(value_of(node))),
                layer=self._layer_of[node],
                arguments=arguments,
                keywords=keywords,
            )
        )

    def _leading_up_to(self, node: fx.Node, target: str) -> tuple[str, Element]:
        """Write all calls that a nested ``nn.Sequential`` makes, except the last.

        Returns:
            The module of the last call and its argument; `None` if that is the node's own.
        """
        leaves = list(iterate_leaves(target, self._program.attribute(target)))
        if len(leaves) == 1 and leaves[0][0] == target:
            return target, None
        source = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
            raise NotSerializable("a Sequential called with more than one tensor")
        # The tracer recorded one node for the whole Sequential. Shapes between its leaves are
        # found by running copies of them on the meta device.
        given, value = self._references[source], value_of(source).to("meta")
        for number, (name, module) in enumerate(leaves[:-1]):
            value = run_on_meta(name, module, value)
            self._add_module(name)
            step = f"{node.name}_step_{number}"
            self._found.operations.append(
                Operation(
                    name=step,
                    target=name,
                    kind="module",
                    outputs=(tensor_spec(step, value),),
                    layer=self._layer_of[node],
                    arguments=(given,),
                )
            )
            given = NodeReference(node=step)
        return leaves[-1][0], given

    def _values(self, values: Iterable[Any]) -> tuple[Argument, ...]:
        return tuple(to_argument(value, self._references.__getitem__) for value in values)

    def _add_module(self, target: str) -> None:
        if target not in self._found.modules:
            module = self._program.attribute(target)
            self._found.modules[target] = describe_leaf(target, module)

    def _end(self) -> None:
        flat = self._program.flat_outputs
        self._found.returns = list(self._values(flat))
        self._found.output_paths = _output_paths(self._program.out_spec, len(flat))
        self._found.sample = _sample(self._program)


def _with_constants(program: Program, layers: Layers) -> dict[fx.Node, int]:
    """Return the layer of every computing node; for a constant, the first layer that reads it."""
    found = dict(layers.layer_of)
    for node in reversed(program.graph.nodes):
        if node in layers.constant and node.op.startswith("call_"):
            readers = [found[user] for user in node.users if user in found]
            found[node] = min(readers, default=0)
    return found


def iterate_state(
    model: nn.Module,
) -> Iterable[tuple[tuple[str, ...], Tensor, Literal["parameter", "buffer"]]]:
    """Yield every parameter and buffer once, with all its names."""
    all_named: dict[Literal["parameter", "buffer"], Iterable[tuple[str, Tensor]]] = {
        "parameter": model.named_parameters(remove_duplicate=False),
        "buffer": model.named_buffers(remove_duplicate=False),
    }
    for kind, named in all_named.items():
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            yield tuple(names[key]), tensor, kind


def _is_persistent(model: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    module = find_module(model, owner)
    return module is None or own not in module._non_persistent_buffers_set


def _target(node: fx.Node) -> str:
    if node.op in ("call_module", "call_method"):
        return str(node.target)
    name = str(node.target) if hasattr(node.target, "_schema") else ""
    return name or f"{getattr(node.target, '__name__', node.target)} in {path_of(node) or 'model'}"


def _output_paths(spec: Any, count: int) -> tuple[PathToValue, ...]:
    """Return the path of each flat output in the model's output; indices if it has none."""

    def plain(key: Any) -> str | int:
        values = (getattr(key, name, None) for name in ("key", "idx", "name"))
        return next((value for value in values if isinstance(value, str | int)), str(key))

    try:
        nested = pytree.tree_unflatten([object() for _ in range(count)], spec)
        paths = [tuple(map(plain, path)) for path, _ in pytree.tree_flatten_with_path(nested)[0]]
    except Exception:  # noqa: BLE001 - containers of others' may do anything when put together
        paths = []
    if len(set(paths)) == count and all(len(path) <= 16 for path in paths):
        return tuple(paths)
    return tuple((index,) for index in range(count))


def _sample(program: Program) -> Sample:
    """Describe random inputs, with integers within the range of the captured sample."""
    names = program.structure.names
    ranges = program.sample_ranges or (None,) * len(names)
    inputs = {}
    for name, node, limits in zip(names, program.inputs, ranges, strict=True):
        shape, dtype = tuple(value_of(node).shape), dtype_name(value_of(node).dtype)
        low, high = limits or (0, 0)
        inputs[name] = (
            SampleTensor(shape=shape, dtype=dtype)
            if dtype in RANDN_DTYPES
            else SampleTensor(shape=shape, dtype=dtype, fill="randint", low=low, high=high + 1)
        )
    return Sample(inputs=inputs)
