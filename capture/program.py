"""A traced model: an FX graph over the model's own modules and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.graph import CaptureMode
from .sample import CallStructure

PATH = "stagewright_path"
"""Key of ``node.meta`` for the fully qualified name of the module a node belongs to."""

CALL = "stagewright_call"
"""Key of ``node.meta`` that tells two calls of the same module apart."""

VALUE = "val"
"""Key of ``node.meta`` for the fake tensor a node produces (torch's own key)."""


@dataclass
class Program:
    """A flat graph: placeholders are tensors, the output is a flat list.

    Attributes:
        model: The model; nodes refer to its modules and parameters by their names.
        holder: Where names not found on the model (lifted constants) live.
        graph: The nodes, each with its module path, call and fake value in ``meta``.
        structure: Names of the inputs, in order.
        inputs: Their placeholders, in the same order.
        out_spec: Rebuilds the model's output from the flat list.
        fixed_mode: Operations whose training or evaluation behaviour is frozen in the graph.
        notes: What a reader should know.
    """

    model: nn.Module
    holder: nn.Module
    graph: fx.Graph
    mode: CaptureMode
    structure: CallStructure
    inputs: list[fx.Node]
    out_spec: Any
    training: bool
    fixed_mode: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def output_node(self) -> fx.Node:
        last: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return last

    @property
    def flat_outputs(self) -> list[Any]:
        """Nodes or constants, one per leaf of ``out_spec``."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    def attribute(self, target: str) -> Any:
        """The module, parameter, buffer or constant of that name."""
        for root in (self.model, self.holder):
            try:
                return resolve(root, target)
            except AttributeError:
                continue
        raise AttributeError(target)


def resolve(root: nn.Module, target: str) -> Any:
    """``resolve(model, "layer1.0.conv1")`` follows the dots."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def path_of(node: fx.Node) -> str:
    """Fully qualified name of the module a node was traced in; empty for the root."""
    return str(node.meta.get(PATH, ""))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors inside a node's value: itself, or the elements of a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def value_of(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta.get(VALUE)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that are views of one storage, fake ones included."""
    return int(tensor.untyped_storage()._cdata)


_UPDATED_WITHOUT_SAYING = ("running_mean", "running_var")
"""Arguments that normalisations change in training, though their schemas do not declare it."""


def mutated_inputs(node: fx.Node, program: Program) -> list[fx.Node]:
    """The nodes whose value this node changes in place."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        changed = [
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for position, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in _UPDATED_WITHOUT_SAYING
        ]
        return [value for value in changed if isinstance(value, fx.Node)]
    in_place = False
    if node.op == "call_module":
        module = program.attribute(str(node.target))
        in_place = any(getattr(child, "inplace", False) for child in module.modules())
    elif node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__")
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        in_place = (
            node.kwargs.get("inplace") is True
            or (name.startswith("i") and getattr(node.target, "__module__", "") == "_operator")
            or name == "setitem"
            or (name.endswith("_") and not name.endswith("__"))
        )
    return list(node.all_input_nodes[:1]) if in_place else []
