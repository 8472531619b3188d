"""Constant nodes: values that depend on no input and no weight, such as position ids and masks.

Every stage that needs a constant recomputes it instead of receiving it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from .mutation import changed_storages, is_random, is_region
from .program import Program, named_tensors, storages_of


def constant_nodes(program: Program) -> set[fx.Node]:
    """Return the nodes whose value is equal in every step and whose memory is never written to."""
    state = named_tensors(program.model)
    changed = {key for node in program.graph.nodes for key in changed_storages(node, program)}
    constant: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            value = program.attribute(str(node.target))
            if str(node.target) not in state and not isinstance(value, nn.Module):
                constant.add(node)
        elif (
            node.op == "call_function"
            and not is_region(node)
            and not is_random(node)
            and all(source in constant for source in node.all_input_nodes)
            and changed.isdisjoint(storages_of([node]))
        ):
            constant.add(node)
    return constant


def evaluate(program: Program, node: fx.Node, constant: set[fx.Node]) -> Tensor | None:
    """Compute the value of a constant node; return `None` if it is not constant or not a tensor.

    For a model on the meta device the value is computed on the CPU, unless it starts from a tensor
    without data.
    """
    if node not in constant:
        return None
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for current in (*_ancestors(node), node):
            if current.op == "get_attr":
                values[current] = program.attribute(str(current.target))
            else:
                given = fx.map_arg((current.args, current.kwargs), values.__getitem__)
                args, kwargs = pytree.tree_map(_where_data_is, given)
                values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
    result = values[node]
    return result if isinstance(result, Tensor) and not result.is_meta else None


def _where_data_is(argument: Any) -> Any:
    is_meta = isinstance(argument, torch.device) and argument.type == "meta"
    return torch.device("cpu") if is_meta else argument


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """Return all nodes that a node is computed from, in graph order."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending += current.all_input_nodes
    return [current for current in node.graph.nodes if current in found]
