"""Description of a model for a row of the capture table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Kind = Literal[
    "transformers", "vision", "recurrent", "composed", "trap", "hostile", "drawn", "timm"
]

DRAWN: tuple[Kind, ...] = ("drawn", "timm")
"""Kinds whose architectures are drawn at random: what does not build is passed over."""


@dataclass(frozen=True)
class Architecture:
    """A model and its inputs, both drawn from torch's current random state.

    Attributes:
        name: As in the table.
        kind: Where it belongs.
        build: Makes the model.
        sample: Makes one micro-batch, of the same shapes every time.
        seeds: How many draws of inputs are compared; more where a choice depends on them.
        differentiable_inputs: Whether eager itself can differentiate floating inputs.
        trap: What a capture gets wrong here, for architectures made for that.
    """

    name: str
    kind: Kind
    build: Callable[[], nn.Module]
    sample: Callable[[], Any]
    seeds: int = 2
    trap: str = ""
    differentiable_inputs: bool = True
