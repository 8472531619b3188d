"""Tracing with ``torch.fx``: child by child for ``nn.Sequential``, or symbolically."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree

from ...core.errors import CaptureError, first_line
from ..observation.forward_observation import TracingTarget
from ..observation.preserve import get_random_state, preserve_model
from ..program.program import CALL, OPAQUE, PATH, VALUE, Program, is_inside, path_of
from ..sample import CallStructure
from .export import silence_loggers


def trace_sequential(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    """Trace an ``nn.Sequential`` as one call per child, whatever the children do inside."""
    graph = fx.Graph()
    value = graph.placeholder(subject.structure.names[0])
    for name in subject.model._modules:
        value = graph.call_module(name, (value,))
        value.meta[PATH], value.meta[CALL] = name, name
        for path, reason in opaque.items():
            if is_inside(path, name):
                value.meta[OPAQUE] = reason if path == name else f"{path} {reason}"
    graph.output(value)
    program = _finish(subject, graph, "sequential")
    program.opaque = dict(opaque)
    return program


def trace_symbolically(subject: TracingTarget, opaque: Mapping[str, str]) -> Program:
    """Trace symbolically, with ``torch.nn`` modules and the opaque ones as leaves."""
    model = subject.model
    tracer = _Tracer(subject.structure)
    tracer.leaves = {id(model.get_submodule(path)) for path in opaque}
    given = set(subject.structure.names)
    parameters = inspect.signature(model.forward).parameters.values()
    if any(entry.kind is entry.VAR_POSITIONAL for entry in parameters):
        raise CaptureError("torch.fx: forward takes *args, whose number is unknown")
    # fx then gives the decorator's code the arguments of what it decorates.
    is_decorated = hasattr(model.forward, "__wrapped__") and not subject.structure.arguments
    if is_decorated and any(entry.kind is entry.VAR_KEYWORD for entry in parameters):
        raise CaptureError("torch.fx: forward has a decorator and takes **kwargs, as one of both")
    # Parameters that the sample does not give are fixed at their defaults: symbolic values would
    # make branches such as `if mask is not None` untraceable.
    defaults = {
        entry.name: entry.default
        for entry in parameters
        if entry.default is not entry.empty and entry.name not in given
    }
    before = get_random_state()
    try:
        graph = tracer.trace(model, concrete_args=defaults or None)
    except Exception as error:
        where = tracer.current_path or "the model itself"
        raise CaptureError(
            f"torch.fx: {type(error).__name__} in {where}: {first_line(error)}",
            module=tracer.current_path,
        ) from error
    if tracer.has_branched:
        raise CaptureError("torch.fx: forward branches on its data, and catches the tracer's error")
    if get_random_state() != before:
        raise CaptureError("torch.fx: a random number was drawn while tracing and would be frozen")
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target not in given:
            _erase(graph, node)  # together with fx's check that the default was not changed
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        for key, (path, _) in stack.items():
            node.meta[PATH], node.meta[CALL] = path, key
        if node.op == "call_module":
            node.meta[PATH] = str(node.target)
            if str(node.target) in opaque:
                node.meta[OPAQUE] = opaque[str(node.target)]
    program = _finish(subject, graph, "trace")
    program.opaque = dict(opaque)
    return program


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a node and all nodes computed from it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


class _Tracer(fx.Tracer):
    """An ``fx.Tracer`` that remembers the current module and whether it met a branch on data."""

    current_path: str | None = None
    leaves: Collection[int] = ()
    has_branched = False

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.has_branched = True  # fx raises a ValueError here, which forward may catch
        return super().to_bool(obj)

    def __init__(self, structure: CallStructure) -> None:
        super().__init__()
        self._structure = structure

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        if not self._structure.arguments:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        # A nested argument is put together from one placeholder for each of its tensors.
        names = self._structure.names
        flat: Any = [self.create_proxy("placeholder", name, (), {}) for name in names]
        args, kwargs = self._structure.unflatten(flat)
        return (lambda: root_fn(self.root, *args, **kwargs)), []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self.leaves or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.current_path = self.path_of_module(m)
        return super().call_module(m, forward, args, kwargs)


def _finish(
    subject: TracingTarget, graph: fx.Graph, mode: Literal["sequential", "trace"]
) -> Program:
    """Flatten the output, annotate nodes with fake values, and split tuples into elements."""
    model, structure = subject.model, subject.structure
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    order = [placeholders[name] for name in structure.names]
    output = next(node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    values = _propagate(model, graph, dict(zip(order, subject.flat, strict=True)))
    for node in graph.nodes:
        if node is not output:
            node.meta[VALUE] = values[node.name]
    shape = fx.map_arg(result, lambda node: values[node.name])
    leaves, out_spec = pytree.tree_flatten(shape)
    flat_nodes = _flat_nodes(graph, output, result, len(leaves))
    output.args = (flat_nodes,)
    graph.lint()
    return Program(
        model=model,
        holder=model,
        graph=graph,
        mode=mode,
        structure=structure,
        inputs=order,
        out_spec=out_spec,
        training=model.training,
    )


def _flat_nodes(graph: fx.Graph, output: fx.Node, result: Any, count: int) -> list[Any]:
    """Return the leaves of the output as nodes, adding accesses to nodes that are tuples."""
    flat: list[Any] = []
    for leaf in pytree.tree_flatten(result)[0]:
        value = leaf.meta[VALUE] if isinstance(leaf, fx.Node) else leaf
        if isinstance(leaf, fx.Node) and not isinstance(value, Tensor):
            items, spec = pytree.tree_flatten(value)
            if spec.num_children != len(items):
                raise CaptureError(f"the model returns a nested structure from {path_of(leaf)!r}")
            keys = list(value) if isinstance(value, dict) else range(len(items))
            for key, item in zip(keys, items, strict=True):
                with graph.inserting_before(output):
                    part = graph.call_function(operator.getitem, (leaf, key))
                part.meta = {**leaf.meta, VALUE: item}
                flat.append(part)
        else:
            flat.append(leaf)
    if len(flat) != count:
        raise CaptureError("the model's output could not be flattened; return tensors or a tuple")
    return flat


def _propagate(model: nn.Module, graph: fx.Graph, inputs: dict[fx.Node, Tensor]) -> dict[str, Any]:
    """Find nodes' shapes, dtypes and aliasing by name, on fake tensors or else by a real run."""
    # Python code that reads its data, such as `if x.sum() > 0` in a leaf, fails on fake tensors.
    # GraphModule copies the graph's nodes one to one, so names identify them.
    module = fx.GraphModule(model, graph)
    given = [inputs[node] for node in graph.nodes if node.op == "placeholder"]
    with warnings.catch_warnings(), silence_loggers("torch"), torch.no_grad():
        warnings.simplefilter("ignore")
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        recorder = ValueRecorder(module)
        try:
            fakes = [fake_mode.from_tensor(tensor) for tensor in given]
            with fake_mode, _fake_state(module, fake_mode):
                recorder.run(*fakes)
        except Exception as error:
            path, place = path_of(recorder.node), recorder.place
            in_leaf = recorder.node.op == "call_module"
            if isinstance(error, DynamicOutputShapeException) and not in_leaf:
                # The real run would show a shape that holds for this sample only.
                reason = f"the shape of {place!r} depends on data"
                raise CaptureError(reason, module=path) from error
            recorder = ValueRecorder(module)
            try:
                with preserve_model(model):
                    recorder.run(*given)
            except Exception as error:
                place = recorder.place
                raise CaptureError(
                    f"{type(error).__name__} in {place!r}: {first_line(error)}", module=place
                ) from error
    return recorder.values


class ValueRecorder(fx.Interpreter):
    """Interpreter that keeps the value of every node by name, and the node that it is at."""

    def __init__(self, module: fx.GraphModule) -> None:
        # No value may be freed: its storage's key could be that of a later one.
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self.node: fx.Node = next(iter(module.graph.nodes))

    @property
    def place(self) -> str:
        return path_of(self.node) or self.node.name

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        value = super().run_node(n)
        if n.op != "output":
            self.values[n.name] = value
        return value


@contextmanager
def _fake_state(module: nn.Module, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Replace a module's parameters and buffers by fake tensors inside."""
    tables: list[dict[str, Any]] = [
        table
        for child in module.modules()
        if not isinstance(child, torch.jit.ScriptModule)
        for table in (child._parameters, child._buffers)
    ]
    saved = [(table, dict(table)) for table in tables]
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake_mode.from_tensor(tensor)
        yield
    finally:
        for table, tensors in saved:
            table.update(tensors)
