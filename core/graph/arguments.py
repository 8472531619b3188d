"""Arguments of operations as data: references to values, and literals."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..document import LongTuple, Name, Record
from .tensors import DType, Integer

Text = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_,>.\- ]*$")]
"""A mode or an einsum equation; never a name to look up."""


class NodeReference(Record):
    """The result of an earlier operation."""

    node: Name


class InputReference(Record):
    """One of the model's inputs."""

    input: Name


class StateReference(Record):
    """A parameter, buffer or constant."""

    state: Name


class DTypeArgument(Record):
    dtype: DType


class MemoryFormatArgument(Record):
    memory_format: Literal[
        "contiguous_format", "channels_last", "channels_last_3d", "preserve_format"
    ]


class DeviceArgument(Record):
    """Wherever the graph is run: a graph names no device."""

    device: Literal["here"] = "here"


class SpecialFloat(Record):
    """A number that JSON has no way to write."""

    special: Literal["inf", "-inf", "nan"]


Reference = NodeReference | InputReference | StateReference
Literals = bool | Integer | float | Text | None
Element = (
    Reference | DTypeArgument | MemoryFormatArgument | DeviceArgument | SpecialFloat | Literals
)
Argument = Element | Annotated[LongTuple[Element], Field(max_length=100_000)]
"""One argument: JSON numbers, booleans and strings stand for themselves, arrays for lists."""

Arguments = Annotated[LongTuple[Argument], Field(max_length=10_000)]

Setting = Literals | Annotated[tuple[Literals, ...], Field(max_length=64)]
"""One argument of a ``torch.nn`` constructor."""

Path = Annotated[tuple[Annotated[str, Field(max_length=200)] | Integer, ...], Field(max_length=16)]
"""Where a value sits in what the model returns: keys of mappings, positions in sequences."""
