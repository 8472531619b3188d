"""Mutation analysis: the values that an operation changes in place."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from .program import OPAQUE, WRITTEN, Program, modules_called, storages_of

_UPDATED_WITHOUT_SAYING = ("running_mean", "running_var")
"""Arguments that normalisations change in training although their schemas do not declare it: ATen's
batch_norm and instance_norm are declared without aliases."""

CHANGE_NO_VALUE = ("detach_", "requires_grad_")

_IN_PLACE_OPERATORS = frozenset(
    (
        operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
        operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift,
        operator.isub, operator.itruediv, operator.ixor, operator.setitem,
    )
)  # fmt: skip


def mutated_inputs(node: fx.Node, program: Program) -> list[fx.Node]:
    """Return the nodes whose values this node changes in place.

    A module that is not torch's own is assumed to change its first input, since its code is not
    inspected.
    """
    if OPAQUE in node.meta:
        return _written_by_opaque(node, program)
    if node.op == "call_module":
        module = program.attribute(str(node.target))
        opaque = not type(module).__module__.startswith(("torch.nn.", "stagewright."))
        in_place = opaque or any(getattr(child, "inplace", False) for child in module.modules())
    elif node.op == "call_method":
        in_place = _says_in_place(str(node.target))
    elif isinstance(node.target, OpOverload):
        return _by_schema(node)
    elif isinstance(node.target, HigherOrderOperator):
        return _inside_region(node, program)
    else:
        in_place = node.target in _IN_PLACE_OPERATORS or (
            node.op == "call_function"
            and (
                node.kwargs.get("inplace") is True
                or _says_in_place(getattr(node.target, "__name__", ""))
            )
        )
    return list(node.all_input_nodes[:1]) if in_place else []


def changed_storages(node: fx.Node, program: Program) -> set[int]:
    """Return the keys of the storages that a node changes in place."""
    return storages_of(mutated_inputs(node, program))


def _written_by_opaque(node: fx.Node, program: Program) -> list[fx.Node]:
    """Return the first tensor argument, and those that the eager call was seen to change."""
    given: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), given.append)
    called = modules_called(node, program)
    tensors = [
        source
        for source in given
        if source.op != "get_attr" or program.attribute(str(source.target)) not in called
    ]
    written = {0, *node.meta.get(WRITTEN, ())}
    return list(
        dict.fromkeys(source for position, source in enumerate(tensors) if position in written)
    )


def region_of(node: fx.Node, program: Program) -> tuple[fx.Graph, list[Any]] | None:
    """Return the graph and the operands of a ``no_grad`` or autocast region, if the node is one."""
    if not isinstance(node.target, HigherOrderOperator):
        return None
    for position, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            body = program.attribute(str(argument.target))
            if isinstance(body, fx.GraphModule):
                return body.graph, list(node.args[position + 1 :])
    return None


def _by_schema(node: fx.Node) -> list[fx.Node]:
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    if schema.name.rpartition("::")[2] in CHANGE_NO_VALUE:
        return []
    changed = [
        node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in _UPDATED_WITHOUT_SAYING
    ]
    return [value for value in changed if isinstance(value, fx.Node)]


def _inside_region(node: fx.Node, program: Program) -> list[fx.Node]:
    """Return the operands that a region changes, also through views made inside it."""
    region = region_of(node, program)
    if region is None:
        return [source for source in node.all_input_nodes if source.op != "get_attr"]
    graph, operands = region
    # Operand from which each inner value may be a view. A schema without aliasing information is
    # assumed to alias its first argument, as views do.
    origin: dict[fx.Node, Any] = {}
    changed: list[fx.Node] = []
    placeholders = [inner for inner in graph.nodes if inner.op == "placeholder"]
    for inner, operand in zip(placeholders, operands, strict=False):
        origin[inner] = operand
    for inner in graph.nodes:
        if inner.op != "call_function":
            continue
        for source in mutated_inputs(inner, program):
            if isinstance(origin.get(source), fx.Node):
                changed.append(origin[source])
        if inner.all_input_nodes and inner.all_input_nodes[0] in origin and _may_alias(inner):
            origin[inner] = origin[inner.all_input_nodes[0]]
    return list(dict.fromkeys(changed))


def _may_alias(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _says_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in CHANGE_NO_VALUE


def is_region(node: fx.Node) -> bool:
    """Return True if a node is a sub-graph, such as a ``no_grad`` region."""
    return isinstance(node.target, HigherOrderOperator)


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
