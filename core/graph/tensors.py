"""Tensors as data: a name, a shape and a dtype, without torch."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import Field

from ..document import Record

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

DIFFERENTIABLE: frozenset[DType] = frozenset(
    ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
)

Dimension = Annotated[int, Field(ge=0, le=2**40)]


class TensorSpec(Record):
    """Shape and dtype of one tensor. ``requires_grad`` says whether a gradient flows back."""

    name: str
    shape: tuple[Dimension, ...] = Field(max_length=16)
    dtype: DType
    requires_grad: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the elements, without padding."""
        return prod(self.shape) * ELEMENT_SIZE_BYTES[self.dtype]
