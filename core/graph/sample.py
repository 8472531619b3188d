"""Samples as data: named tensors with a shape, a dtype and a seeded fill."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..document import Record
from .tensors import DIFFERENTIABLE, DType

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
        if self.fill == "randn" and self.dtype not in DIFFERENTIABLE:
            raise ValueError(f"fill 'randn' needs a floating dtype, not {self.dtype!r}")
        if self.fill == "randint" and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        size_bytes = 16
        for dimension in self.shape:
            size_bytes *= dimension
        if size_bytes > 16 * MAX_SAMPLE_BYTES:
            raise ValueError(f"shape {list(self.shape)} has more than {MAX_SAMPLE_BYTES} elements")
        return self


class Sample(Record):
    """The inputs of one micro-batch, and optionally the target its loss is taken against.

    Attributes:
        inputs: Keyword arguments of the model's ``forward``, by name.
        seed: Seeds every fill.
    """

    inputs: dict[str, SampleTensor] = Field(min_length=1, max_length=64)
    target: SampleTensor | None = None
    seed: int = Field(0, ge=0, lt=2**63)
