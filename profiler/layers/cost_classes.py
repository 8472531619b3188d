"""Cost classes: layers that do the same work and so cost the same.

Two layers are of one class if they run the same operations with the same constants in the same
arrangement, on inputs, parameters and buffers of the same shapes, strides and types, of which the
same ones need gradients. Values are not compared: a layer whose cost depends on them (experts
chosen by a router) is assumed to cost what its class does.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from ...capture.captured import Captured
from ...capture.program.cuts import differentiable_nodes
from ...capture.program.program import Program, value_of
from .layer_run import LayerRun

SIMPLE = (bool, int, float, complex, str, bytes, type(None))

NOT_CONFIGURATION = frozenset(("stagewright_follows", "_backward_hooks", "_is_full_backward_hook"))
"""Attributes of modules that say nothing about what they cost."""


def cost_classes(captured: Captured, runs: Sequence[LayerRun]) -> list[str]:
    """Return each layer's class; equal strings for equal layers."""
    program = captured.program
    differentiable = differentiable_nodes(program)
    # Shared by all layers: an object that two layers hold has one number in both of their keys.
    objects: dict[int, int] = {}
    by_layer: list[list[fx.Node]] = [[] for _ in captured.layers.names]
    for node in program.graph.nodes:
        if node in captured.layers.layer_of:
            by_layer[captured.layers.layer_of[node]].append(node)
    keys = [
        repr(_Key(program, differentiable, objects, run, nodes).of_layer())
        for run, nodes in zip(runs, by_layer, strict=False)
    ]
    return [hashlib.sha256(key.encode()).hexdigest()[:12] for key in keys]


def members_of(classes: Sequence[str]) -> list[list[int]]:
    """List the layer indices of each class, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(classes):
        found.setdefault(name, []).append(index)
    return list(found.values())


class _Key:
    """Everything the cost of one layer depends on, as nested tuples of plain values.

    Nodes, attributes and other objects are named by the order in which the layer meets them.
    """

    def __init__(
        self,
        program: Program,
        differentiable: set[fx.Node],
        objects: dict[int, int],
        run: LayerRun,
        nodes: list[fx.Node],
    ) -> None:
        self._program, self._differentiable, self._objects = program, differentiable, objects
        self._run, self._nodes = run, nodes
        self._names: dict[fx.Node, tuple[object, ...]] = {}
        self._tensors: dict[int, int] = {}

    def of_layer(self) -> tuple[object, ...]:
        reads = [
            (self._spec(value_of(node)), needed, changed)
            for node, needed, changed in zip(
                self._run.reads, self._run.needs_grad, self._run.changed, strict=True
            )
        ]
        for position, node in enumerate(self._run.reads):
            self._names[node] = ("input", position)
        operations = [self._operation(node) for node in self._nodes]
        writes = [self._names.get(node) for node in self._run.writes if node is not None]
        return tuple(reads), tuple(operations), tuple(writes)

    def _operation(self, node: fx.Node) -> tuple[object, ...]:
        arguments = (self._argument(node.args), self._argument(node.kwargs))
        self._names[node] = ("made", len(self._names))
        if node.op == "call_module":
            target: object = self._module(self._program.attribute(str(node.target)))
        else:
            target = self._callable(node.target)
        return node.op, target, arguments, node in self._differentiable

    def _argument(self, value: Any) -> object:
        if isinstance(value, fx.Node):
            return self._node(value)
        if isinstance(value, tuple | list):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._argument(item)) for key, item in value.items())
        if isinstance(value, slice):
            return "slice", *(self._argument(v) for v in (value.start, value.stop, value.step))
        return repr(value)

    def _node(self, node: fx.Node) -> tuple[object, ...]:
        """Describe another node's operation; constants are recomputed in every layer."""
        if node not in self._names:
            if node.op == "get_attr":
                return self._attribute(self._program.attribute(str(node.target)))
            self._names[node] = ("constant", *self._operation(node))
        return self._names[node]

    def _attribute(self, value: Any) -> tuple[object, ...]:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, fx.GraphModule):
            inner = tuple(self._tensor(t) for t in (*value.parameters(), *value.buffers()))
            return "region", value.code, inner
        return "object", self._module(value) if isinstance(value, nn.Module) else repr(value)

    def _tensor(self, value: Tensor) -> tuple[object, ...]:
        """With a number that tells whether the layer has used the same tensor before."""
        number = self._tensors.setdefault(id(value), len(self._tensors))
        is_parameter = isinstance(value, nn.Parameter)
        return number, is_parameter, value.requires_grad, self._spec(value)

    def _spec(self, value: Any) -> object:
        if isinstance(value, Tensor):
            strides = value.stride() if value.layout.__str__() == "torch.strided" else ()
            return tuple(value.shape), tuple(strides), str(value.dtype), str(value.device)
        if isinstance(value, tuple | list):
            return tuple(self._spec(item) for item in value)
        return repr(value)

    def _module(self, module: nn.Module) -> tuple[object, ...]:
        """Its type, configuration, mode, hooks, and all of that of its children."""
        tensors = (*module._parameters.values(), *module._buffers.values())
        return (
            self._type(module),
            module.extra_repr(),
            module.training,
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            tuple(None if tensor is None else self._tensor(tensor) for tensor in tensors),
            tuple(self._configuration(module)),
            tuple(
                (name, None if child is None else self._module(child))
                for name, child in module._modules.items()
            ),
        )

    def _type(self, module: nn.Module) -> tuple[object, ...]:
        """Its name; a factory makes types of one name that do different things."""
        kind = type(module)
        if isinstance(module, fx.GraphModule):  # a type for each
            return _name(kind), module.code
        if _is_parametrized(kind):  # likewise; how it is parametrized, its children say
            tensors = sorted(name for name in vars(kind) if not name.startswith("__"))
            return "parametrized", *tensors, *self._kind(kind.__mro__[1])
        return self._kind(kind)

    def _kind(self, kind: type) -> tuple[object, ...]:
        name = _name(kind)
        return (name,) if _is_importable(kind) else (name, self._plain(kind))

    def _callable(self, target: Any) -> object:
        """Its name; of a function made by another one also what it holds.

        So the class counts that a custom autograd function applies, and how a module is
        checkpointed.
        """
        name = _callable_name(target)
        if not isinstance(target, FunctionType) or _is_importable(target):
            return name
        cells = tuple(cell.cell_contents for cell in target.__closure__ or ())
        held = (target.__code__, cells, target.__defaults__, target.__kwdefaults__)
        return name, self._plain(held)

    def _configuration(self, module: nn.Module) -> list[tuple[str, object]]:
        """Attributes its Python may look at: a block that knows its number differs from others."""
        return [
            (name, self._plain(value))
            for name, value in sorted(vars(module).items())
            if name not in NOT_CONFIGURATION and name not in _OF_EVERY_MODULE
        ]

    def _plain(self, value: Any) -> object:
        if isinstance(value, SIMPLE):
            return repr(value)
        if isinstance(value, tuple | list):
            return tuple(self._plain(item) for item in value)
        if isinstance(value, dict):
            return tuple((repr(key), self._plain(item)) for key, item in value.items())
        if isinstance(value, Tensor):
            return self._tensor(value)
        return "object", self._objects.setdefault(id(value), len(self._objects))


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_parametrized(kind: type) -> bool:
    """Return whether ``torch.nn.utils.parametrize`` made a type of a module's own type."""
    added = [
        value.fget if isinstance(value, property) else value
        for name, value in vars(kind).items()
        if callable(value) or not name.startswith("__")
    ]
    makers = {getattr(value, "__module__", None) for value in added}
    return makers == {parametrize.__name__}


def _callable_name(target: Any) -> str:
    """Name an operator (its ``str`` has the overload), a function or a method."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", "")
    return f"{getattr(target, '__module__', '')}.{name}" if name else str(target)


def _is_importable(value: type | FunctionType) -> bool:
    """Return whether importing its qualified name gives this very object."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
