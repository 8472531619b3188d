"""Serialization of regions: sub-graphs under another gradient or autocast mode."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import HigherOrderOperator

from ...core.graph.arguments import Argument, Element, NodeReference
from ...core.graph.graph import Operation, Region
from ...core.graph.tensors import ELEMENT_SIZE_BYTES
from ..program.mutation import region_of
from ..program.program import Program, tensors_of, value_of
from ..sample import dtype_name, tensor_spec
from .allowed_ops import allowed_target, is_check
from .literals import NotSerializable, to_argument, to_keywords


def write_region(node: fx.Node, program: Program, layer: int) -> tuple[Region, list[Any]] | None:
    """Serialize the region that a node runs, with its operands; return `None` if it runs none.

    Raises:
        NotSerializable: The region is of another kind, or something in it cannot be represented.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return None
    modes = _modes(node)
    found = region_of(node, program)
    if found is None or node.kwargs:
        raise NotSerializable(f"a call of {node.target}")
    graph, operands = found
    references: dict[fx.Node, Element] = {}
    inputs: list[str] = []
    operations: list[Operation] = []
    returns: Argument = ()
    for inner in graph.nodes:
        if inner.op == "placeholder":
            inputs.append(inner.name)
        elif inner.op == "output":
            returns = to_argument(inner.args[0], references.__getitem__)
        elif inner.op != "call_function":
            raise NotSerializable(f"a {inner.op} inside {node.target}")
        elif is_check(inner):
            continue
        else:
            operations.append(_operation(inner, references, layer))
        references[inner] = NodeReference(node=inner.name)
    if not isinstance(returns, tuple):
        raise NotSerializable(f"{node.target} returning a single value")
    region = Region(
        name=f"region_{node.name}",
        inputs=tuple(inputs),
        operations=tuple(operations),
        returns=returns,
        **modes,
    )
    return region, operands


def _modes(node: fx.Node) -> dict[str, Any]:
    if node.target is wrap_with_set_grad_enabled:
        return {"kind": "enable_grad" if node.args[0] else "no_grad"}
    if node.target is wrap_with_autocast:
        _, dtype, enabled, _ = node.args[:4]
        name = None if dtype is None else dtype_name(dtype)  # type: ignore[arg-type]
        if name is not None and name not in ELEMENT_SIZE_BYTES:
            raise NotSerializable(f"autocast to {dtype}")
        return {"kind": "autocast", "enabled": enabled, "dtype": name}
    raise NotSerializable(f"a call of {node.target}")


def _operation(node: fx.Node, references: dict[fx.Node, Element], layer: int) -> Operation:
    return Operation(
        name=node.name,
        target=allowed_target(node),
        kind="function",
        inputs=tuple(source.name for source in node.all_input_nodes),
        outputs=tuple(tensor_spec(node.name, item) for item in tensors_of(value_of(node))),
        layer=layer,
        arguments=tuple(to_argument(value, references.__getitem__) for value in node.args),
        keywords=to_keywords(node, references.__getitem__),
    )
