"""Parameters, buffers and constants without their values, and how to fill them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..document import Record
from .arguments import Integer
from .tensors import Dimension, DType

MAX_WRITTEN_VALUES = 4096
"""Most elements of a buffer or constant listed one by one; larger ones are given by a pattern."""

Number = bool | Integer | float


class NormalFill(Record):
    """Random numbers around 0 with this standard deviation."""

    kind: Literal["normal"] = "normal"
    std: float = Field(1.0, ge=0)


class IntegerFill(Record):
    """Random integers from ``low`` up to, not including, ``high``."""

    kind: Literal["integers"] = "integers"
    low: Integer = 0
    high: Integer = 1


class ConstantFill(Record):
    """The same number everywhere."""

    kind: Literal["constant"] = "constant"
    value: Number


class RangeFill(Record):
    """``start``, ``start + step``, ... along the last dimension, repeated over the others."""

    kind: Literal["range"] = "range"
    start: Integer = 0
    step: Integer = 1


class CausalFill(Record):
    """One (or true) on and below the diagonal of the last two dimensions, zero above."""

    kind: Literal["causal"] = "causal"


class ValuesFill(Record):
    """Every element, in row-major order."""

    kind: Literal["values"] = "values"
    values: tuple[Number, ...] = Field(max_length=MAX_WRITTEN_VALUES)


Fill = Annotated[
    NormalFill | IntegerFill | ConstantFill | RangeFill | CausalFill | ValuesFill,
    Field(discriminator="kind"),
]


class StateTensor(Record):
    """One parameter, buffer or constant.

    Attributes:
        names: All fully qualified names, the canonical one first; a constant has the one that
            operations refer to it by.
        strides: In elements; `None` for the contiguous layout.
        persistent: Whether it is part of the ``state_dict``.
        fill: What to make up in its place; `None` for a parameter, whose values are random.
    """

    names: tuple[str, ...] = Field(min_length=1, max_length=4096)
    shape: tuple[Dimension, ...] = Field(max_length=16)
    dtype: DType
    kind: Literal["parameter", "buffer", "constant"] = "parameter"
    requires_grad: bool = False
    strides: tuple[Dimension, ...] | None = None
    persistent: bool = True
    fill: Fill | None = None
