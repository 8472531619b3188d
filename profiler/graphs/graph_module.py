"""A graph without code made into a module that runs: allow-listed operations, no weights yet.

Every tensor of state is on the meta device here; `values` makes up real ones.
"""

from __future__ import annotations

import importlib
import keyword
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import OpOverload

from ...capture.program.program import named_tensors, resolve_in
from ...capture.serialize.leaf_modules import build_leaf
from ...core.errors import InvalidInput, first_line
from ...core.graph.allowed_ops import GETITEM
from ...core.graph.arguments import (
    Argument,
    DeviceArgument,
    DTypeArgument,
    InputReference,
    MemoryFormatArgument,
    NodeReference,
    SpecialFloat,
    StateReference,
)
from ...core.graph.graph import Graph, LeafModule, Operation, Region
from ...core.graph.tensors import StateTensor
from ..models.families import make_sample
from .random_values import made_up, meta_tensor, tensor_places

LIBRARIES = {"transformers": "transformers.integrations.moe"}
"""Where operators that are not torch's are registered."""


@dataclass(frozen=True)
class Skeleton:
    """A graph's operations over modules and tensors without memory.

    Attributes:
        model: Parameters, buffers and leaf modules under their names.
        holder: Constants and the bodies of regions.
        graph: Placeholders named as the inputs; a flat list as its output.
        nodes: By name, in order, with the operation each stands for.
        state: What each meta tensor stands for, by identity.
    """

    model: nn.Module
    holder: nn.Module
    graph: fx.Graph
    inputs: list[fx.Node]
    nodes: list[tuple[Operation, fx.Node]]
    state: dict[int, StateTensor]

    def module(self, graph: fx.Graph | None = None) -> fx.GraphModule:
        """Return a module that runs the graph, or another graph over the same attributes.

        The attributes are taken as they are now.
        """
        graph = graph or self.graph
        attributes = {
            str(node.target): resolve_in((self.model, self.holder), str(node.target))
            for node in graph.nodes
            if node.op in ("get_attr", "call_module")
        }
        return fx.GraphModule(attributes, graph)


def skeleton(graph: Graph, device: torch.device) -> Skeleton:
    """Put a graph together for a device."""
    if not graph.rebuildable:
        raise InvalidInput(_why_not(graph), field="/rebuildable")
    return _Builder(graph, device).build()


def _why_not(graph: Graph) -> str:
    if not graph.not_rebuildable:
        return (
            "this graph holds no arguments of its operations, so it cannot be run; capture the "
            "model again with this release"
        )
    reasons = "; ".join(
        f"{entry.layer or 'the model'}: {entry.operation} is {entry.reason}"
        if entry.operation
        else entry.reason
        for entry in graph.not_rebuildable[:3]
    )
    return (
        f"this graph cannot be run without its model's code: {reasons}; measure the model where "
        "its code is, with stagewright profile package.module:model"
    )


class _Builder:
    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._source, self._device = graph, device
        self._model, self._holder = nn.Module(), nn.Module()
        self._graph = fx.Graph()
        self._tensors: dict[str, Tensor] = {}
        self._below: defaultdict[str, list[str]] = defaultdict(list)
        self._attributes: dict[str, fx.Node] = {}
        self._made: dict[str, fx.Node] = {}
        self._inputs: dict[str, fx.Node] = {}
        self._regions = {region.name: region for region in graph.regions}

    def build(self) -> Skeleton:
        source = self._source
        state: dict[int, StateTensor] = {}
        for entry in source.state:
            tensor = meta_tensor(entry)
            state[id(tensor)] = entry
            self._tensors |= dict.fromkeys(entry.names, tensor)
        for name in self._tensors:
            parts = name.split(".")
            for length in range(1, len(parts)):
                self._below[".".join(parts[:length])].append(name)
        for leaf in source.modules:
            self._add_leaf(leaf)
        for entry in source.state:
            for name in entry.names:
                self._add_tensor(name, entry)
        # Before the leaves' own modes: `train` goes down to every child.
        self._model.train(source.training)
        for leaf in source.modules:
            self._model.get_submodule(leaf.name).train(leaf.training)
        inputs = [self._graph.placeholder(tensor.name) for tensor in source.inputs]
        self._inputs = dict(zip((tensor.name for tensor in source.inputs), inputs, strict=True))
        nodes = [(operation, self._add_operation(operation)) for operation in source.operations]
        self._graph.output([self._argument(value) for value in source.returns])
        return Skeleton(self._model, self._holder, self._graph, inputs, nodes, state)

    def _add_leaf(self, leaf: LeafModule) -> None:
        # A leaf brings tensors of its own making. They only prove that its settings and the state
        # agree; `_add_tensor` then replaces them.
        own = {name.removeprefix(f"{leaf.name}."): name for name in self._below[leaf.name]}
        try:
            module = build_leaf(leaf)
        except Exception as error:
            raise InvalidInput(
                f"module {leaf.name!r}: {leaf.type} does not accept these settings: "
                f"{in_one_line(error)}",
                field="/modules",
            ) from error
        wanted = named_tensors(module)
        if set(wanted) != set(own):
            raise InvalidInput(
                f"module {leaf.name!r}: {leaf.type} has the tensors {sorted(wanted)}, the state "
                f"lists {sorted(own)}",
                field="/modules",
            )
        for key, tensor in wanted.items():
            if tensor.shape != self._tensors[own[key]].shape:
                raise InvalidInput(
                    f"{own[key]!r} has shape {list(self._tensors[own[key]].shape)}, but "
                    f"{leaf.type} needs {list(tensor.shape)}",
                    field="/state",
                )
        _place(self._model, leaf.name, module)

    def _add_tensor(self, name: str, entry: StateTensor) -> None:
        tensor = self._tensors[name]
        path, _, own = name.rpartition(".")
        constant = entry.kind == "constant"
        parent = _container(self._holder if constant else self._model, path)
        # A buffer is registered first, for its persistence. Assignment alone makes a parameter a
        # parameter, and leaves a constant a plain attribute.
        if own not in {**parent._parameters, **parent._buffers}:
            _insist_free(parent, own, name)
            if entry.kind == "buffer":
                parent.register_buffer(own, tensor, persistent=entry.persistent)
        setattr(parent, own, tensor)

    def _add_operation(self, operation: Operation) -> fx.Node:
        arguments = tuple(map(self._argument, operation.arguments))
        keywords = {name: self._argument(value) for name, value in operation.keywords.items()}
        kind, target = "call_function", None
        if operation.kind == "module":
            kind, target = "call_module", operation.target
        elif operation.kind == "region":
            target, arguments = self._region_call(operation, arguments)
            keywords = {}
        else:
            target = function_of(operation)
            keywords |= self._placement(target, arguments, keywords)
        node = self._graph.create_node(kind, target, arguments, keywords, operation.name)
        self._made[operation.name] = node
        return node

    def _region_call(
        self, operation: Operation, operands: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the function that runs a region, and its arguments."""
        region = self._regions[operation.target]
        name = f"_{region.name}"
        if name not in self._holder._modules:
            self._holder._modules[name] = self._body(region)
        body = self._graph.get_attr(name)
        if region.kind == "autocast":
            dtype = None if region.dtype is None else getattr(torch, region.dtype)
            modes = (self._device.type, dtype, region.enabled, None)
            return wrap_with_autocast, (*modes, body, *operands)
        return wrap_with_set_grad_enabled, (region.kind == "enable_grad", body, *operands)

    def _body(self, region: Region) -> fx.GraphModule:
        # `_add_operation` adds to `self._graph`, which is the body for as long as it is built.
        outer = self._graph, self._made, self._inputs
        self._graph = fx.Graph()
        self._made = {name: self._graph.placeholder(name) for name in region.inputs}
        self._inputs = {}
        for operation in region.operations:
            if operation.kind != "function":
                raise InvalidInput(
                    f"region {region.name!r} holds a {operation.kind}; it may hold operators only",
                    field="/regions",
                )
            self._add_operation(operation)
        self._graph.output(tuple(map(self._argument, region.returns)))
        body = fx.GraphModule(nn.Module(), self._graph)
        self._graph, self._made, self._inputs = outer
        return body

    def _placement(
        self, target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the device keyword for operators that choose where their result is."""
        if not isinstance(target, OpOverload):
            return {}
        # Without it `arange` or `zeros` would be on the CPU, wherever the graph is built.
        for position, declared in enumerate(target._schema.arguments):
            if declared.name == "device":
                given = position < len(arguments) or "device" in keywords
                return {} if given else {"device": self._device}
        return {}

    def _argument(self, value: Argument) -> Any:
        if isinstance(value, tuple):
            return list(map(self._argument, value))
        if isinstance(value, NodeReference):
            return self._made[value.node]
        if isinstance(value, InputReference):
            return self._inputs[value.input]
        if isinstance(value, StateReference):
            return self._attribute(value.state)
        if isinstance(value, DTypeArgument):
            return getattr(torch, value.dtype)
        if isinstance(value, MemoryFormatArgument):
            return getattr(torch, value.memory_format)
        if isinstance(value, DeviceArgument):
            return self._device
        if isinstance(value, SpecialFloat):
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value.special]
        return value

    def _attribute(self, name: str) -> fx.Node:
        if name not in self._attributes:
            self._attributes[name] = self._graph.get_attr(name)
        return self._attributes[name]


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    path, _, own = name.rpartition(".")
    parent = _container(root, path)
    _insist_free(parent, own, name)
    parent.add_module(own, module)


def _container(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a path, creating empty modules where there are none."""
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            _insist_free(module, part, path)
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def _insist_free(parent: nn.Module, own: str, name: str) -> None:
    if hasattr(parent, own) or keyword.iskeyword(own):
        raise InvalidInput(
            f"{name!r} cannot be the name of a module or tensor: modules have {own!r} already, or "
            "Python has; rename it in the model and capture it again",
            field="/state",
        )


def function_of(operation: Operation) -> Any:
    """Return the function that an operation of kind ``function`` calls."""
    if operation.target == GETITEM:
        return operator.getitem
    library, name, overload = operation.target.split(".")
    try:
        if library in LIBRARIES:
            # Importing it registers its operators with torch.
            importlib.import_module(LIBRARIES[library])
        return getattr(getattr(getattr(torch.ops, library), name), overload)
    except (AttributeError, ImportError) as error:
        raise InvalidInput(
            f"operation {operation.name!r} calls {operation.target}, which this installation does "
            f"not have (torch {torch.__version__}): {in_one_line(error)}",
            field="/operations",
        ) from error


def in_one_line(error: Exception) -> str:
    """Describe an error in one line: its type and message."""
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True)
class RebuiltModel:
    """A model that runs, and one micro-batch for it.

    Attributes:
        model: Takes the graph's inputs by name and returns what the captured model did, mappings
            as dictionaries and sequences as tuples. Parameters and buffers have the captured
            model's names, so its ``state_dict`` can be loaded.
        sample: Random inputs by name.
    """

    model: fx.GraphModule
    sample: dict[str, Tensor]


def rebuild(graph: Graph, *, device: torch.device | str = "cpu", seed: int = 0) -> RebuiltModel:
    """Build a module from a rebuildable graph's allow-listed operations, with random weights.

    Nothing is read but the graph. It is checked operation by operation when it runs; whoever does
    not trust a graph runs it in a process of its own (see `profiler.measure_worker`).
    """
    device = torch.device(device)
    parts = skeleton(graph, device)
    for node in parts.graph.nodes:
        if node.op == "output":
            node.args = (_nested(node.args[0], graph.output_paths),)
    _give_values(parts, device, seed)
    module = parts.module()
    for root in (parts.model, parts.holder):
        _adopt(module, root, persistent=root is parts.model)
    _reorder(module, [entry.names[0] for entry in graph.state])
    assert graph.sample is not None, "reading a rebuildable graph checks that"
    inputs, _ = make_sample(graph.sample.model_copy(update={"seed": seed}), device)
    return RebuiltModel(module, inputs)


def _give_values(parts: Skeleton, device: torch.device, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    # One value per identity: tied tensors stay tied.
    value = cache(lambda meta: made_up(parts.state[id(meta)], device, generator))
    for module, name, tensor in list(tensor_places((parts.model, parts.holder))):
        setattr(module, name, value(tensor))


def _adopt(module: fx.GraphModule, root: nn.Module, *, persistent: bool) -> None:
    """Register the tensors no operation reads, and keep constants out of the ``state_dict``."""
    for path, owner in root.named_modules():
        target = _container(module, path)
        # `GraphModule` takes a called module over as it is; all its tensors are there already.
        if target is owner:
            continue
        for name, parameter in owner._parameters.items():
            target.register_parameter(name, parameter)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                kept = name not in owner._non_persistent_buffers_set
                target.register_buffer(name, buffer, persistent=kept)
        if not persistent:
            # `GraphModule` registers plain tensor attributes as buffers that are saved.
            target._non_persistent_buffers_set |= set(target._buffers) & set(vars(owner))


def _reorder(module: fx.GraphModule, names: Sequence[str]) -> None:
    """Children and tensors in the captured model's order: of tied names, the first one counts."""
    rank: dict[str, int] = {}
    for position, name in enumerate(names):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            rank.setdefault(".".join(parts[:length]), position)
    for path, owner in list(module.named_modules()):
        prefix = f"{path}." if path else ""
        tables: tuple[dict[str, Any], ...] = (owner._modules, owner._parameters, owner._buffers)
        for table in tables:
            ordered = sorted(table, key=lambda own: rank.get(prefix + own, len(names)))
            for own in ordered:
                # Dictionaries keep the order of insertion: each in turn goes to the end.
                table[own] = table.pop(own)


def _nested(values: Sequence[Any], paths: Sequence[Sequence[str | int]]) -> Any:
    if len(paths) == 1 and not paths[0]:
        return values[0]
    branches: dict[str | int, tuple[list[Any], list[Sequence[str | int]]]] = {}
    for value, path in zip(values, paths, strict=True):
        if not path:
            raise InvalidInput("a value is returned alone and with others", field="/output_paths")
        found = branches.setdefault(path[0], ([], []))
        found[0].append(value)
        found[1].append(path[1:])
    nested = {key: _nested(*found) for key, found in branches.items()}
    if all(isinstance(key, int) for key in nested):
        return tuple(nested.values())
    return {str(key): value for key, value in nested.items()}
