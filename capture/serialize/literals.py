"""Serialization of the arguments of traced operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from ...core.graph.arguments import (
    Argument,
    DeviceArgument,
    DTypeArgument,
    Element,
    MemoryFormatArgument,
    SpecialFloat,
)
from ...core.graph.tensors import ELEMENT_SIZE_BYTES
from ..sample import dtype_name

LEFT_OUT = ("device", "pin_memory")
"""Keywords for the placement of a result, which is wherever the graph is run."""


class NotSerializable(Exception):
    """Something that a document cannot contain; the message describes it."""


def to_keywords(node: fx.Node, refer: Callable[[fx.Node], Element]) -> dict[str, Argument]:
    """Convert the keyword arguments of a node, except those for the placement of its result.

    Raises:
        NotSerializable: One of them cannot be represented.
    """
    written = {}
    for name, value in node.kwargs.items():
        if name == "layout":
            if value not in (None, torch.strided):
                raise NotSerializable(f"the layout {value}")
        elif name not in LEFT_OUT:
            written[name] = to_argument(value, refer)
    return written


def to_argument(value: Any, refer: Callable[[fx.Node], Element]) -> Argument:
    """Convert an argument; ``refer`` returns the reference to a node.

    Raises:
        NotSerializable: The argument cannot be represented.
    """
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
