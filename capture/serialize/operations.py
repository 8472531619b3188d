"""Serialization of traced operations: their targets and arguments, and regions of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch._ops import HigherOrderOperator, OpOverload

from ...core.graph.allowed_ops import GETITEM, OPERATORS
from ...core.graph.arguments import (
    Argument,
    DeviceArgument,
    DTypeArgument,
    Element,
    MemoryFormatArgument,
    NodeReference,
    SpecialFloat,
)
from ...core.graph.graph import Operation, Region
from ...core.graph.tensors import ELEMENT_SIZE_BYTES
from ..program.mutation import region_of
from ..program.program import Program, tensors_of, value_of
from ..sample import dtype_name, tensor_spec

ASSERTIONS = frozenset(
    ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
)
"""Operators that compute nothing, inserted by torch.export; they are left out of graphs."""

LEFT_OUT = ("device", "pin_memory")
"""Keywords for the placement of a result, which is wherever the graph is run."""


class NotSerializable(Exception):
    """Something that a document cannot contain; the message describes it."""


def to_keywords(node: fx.Node, refer: Callable[[fx.Node], Element]) -> dict[str, Argument]:
    """Convert the keyword arguments of a node, except those for the placement of its result."""
    written = {}
    for name, value in node.kwargs.items():
        if name == "layout":
            if value not in (None, torch.strided):
                raise NotSerializable(f"the layout {value}")
        elif name not in LEFT_OUT:
            written[name] = to_argument(value, refer)
    return written


def to_argument(value: Any, refer: Callable[[fx.Node], Element]) -> Argument:
    """Convert an argument; ``refer`` returns the reference to a node."""
    if isinstance(value, tuple | list):
        return tuple(_element(item, refer) for item in value)
    return _element(value, refer)


def _element(value: Any, refer: Callable[[fx.Node], Element]) -> Element:
    if isinstance(value, fx.Node):
        try:
            return refer(value)
        except KeyError:
            raise NotSerializable(f"a use of {value.name}, which is no value of its own") from None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return SpecialFloat(special="nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, str) and len(value) <= 200:
        return value
    if isinstance(value, torch.dtype):
        name = dtype_name(value)
        if name in ELEMENT_SIZE_BYTES:
            return DTypeArgument(dtype=name)
    if isinstance(value, torch.memory_format):
        return MemoryFormatArgument(memory_format=cast(Any, str(value).removeprefix("torch.")))
    if isinstance(value, torch.device):
        return DeviceArgument()
    raise NotSerializable(f"an argument of type {type(value).__name__}")


def is_check(node: fx.Node) -> bool:
    return not node.users and getattr(node.target, "__name__", "").split(".")[0] in ASSERTIONS


def allowed_target(node: fx.Node) -> str:
    """Return the listed name of the function that a node calls."""
    if node.target is operator.getitem:
        if not isinstance(node.args[1], int):
            raise NotSerializable("an element taken by something else than its number")
        return GETITEM
    name = str(node.target)
    if not isinstance(node.target, OpOverload):
        raise NotSerializable(
            f"a call of {getattr(node.target, '__name__', name)}, which is Python"
        )
    if name not in OPERATORS:
        raise NotSerializable(f"the operator {name}, which is not on the list")
    return name


def write_region(node: fx.Node, program: Program, layer: int) -> tuple[Region, list[Any]] | None:
    """Serialize the region that a node runs, with its operands; return `None` if it runs none."""
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
