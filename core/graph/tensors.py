"""Tensors as data, without torch: shapes, samples to make up, and state without its values."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..document import LongTuple, Name, NonEmptyTuple, Record

DType = Literal[
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip

ELEMENT_SIZE_BYTES: dict[DType, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

RANDN_DTYPES: frozenset[DType] = frozenset(
    ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
)
"""What torch draws from a normal distribution."""

DIFFERENTIABLE: frozenset[DType] = RANDN_DTYPES | {"float8_e4m3fn", "float8_e5m2"}
"""What a gradient flows through."""

Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Dimension = Annotated[int, Field(ge=0, le=2**40)]


class TensorSpec(Record):
    """Shape and dtype of one tensor.

    Attributes:
        requires_grad: Whether a gradient flows back.
        parts: Devices of which each holds an equal part, where stages split their layers.
    """

    name: Name
    shape: tuple[Dimension, ...] = Field(max_length=16)
    dtype: DType
    requires_grad: bool = False
    parts: int = Field(1, ge=1, le=1024)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the elements that one device holds, without padding."""
        return -(-prod(self.shape) * ELEMENT_SIZE_BYTES[self.dtype] // self.parts)


MAX_SAMPLE_BYTES = 2**30


class SampleTensor(Record):
    """One tensor to make up.

    Attributes:
        shape: The first dimension is the micro-batch size.
        fill: ``randn`` (normal), ``randint`` (from ``low`` up to, not including, ``high``) or
            ``zeros``.
    """

    shape: tuple[Annotated[int, Field(ge=1, le=2**31)], ...] = Field(min_length=1, max_length=8)
    dtype: DType = "float32"
    fill: Literal["randn", "randint", "zeros"] = "randn"
    low: int = 0
    high: int = 2

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fill == "randn" and self.dtype not in RANDN_DTYPES:
            raise ValueError(f"fill 'randn' needs a floating dtype, not {self.dtype!r}")
        if self.fill == "randint" and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if prod(self.shape) > MAX_SAMPLE_BYTES:
            raise ValueError(f"shape {list(self.shape)} has more than {MAX_SAMPLE_BYTES} elements")
        return self


class Sample(Record):
    """The inputs of one micro-batch, and optionally the target its loss is taken against.

    Attributes:
        inputs: Keyword arguments of the model's ``forward``, by name.
        seed: Seeds every fill.
    """

    inputs: dict[Name, SampleTensor] = Field(min_length=1, max_length=64)
    target: SampleTensor | None = None
    seed: int = Field(0, ge=0, lt=2**63)


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
    """Fill with one number everywhere."""

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
    values: LongTuple[Number] = Field(max_length=MAX_WRITTEN_VALUES)


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

    names: NonEmptyTuple[Name] = Field(max_length=4096)
    shape: tuple[Dimension, ...] = Field(max_length=16)
    dtype: DType
    kind: Literal["parameter", "buffer", "constant"] = "parameter"
    requires_grad: bool = False
    strides: Annotated[tuple[Dimension, ...], Field(max_length=16)] | None = None
    persistent: bool = True
    fill: Fill | None = None
