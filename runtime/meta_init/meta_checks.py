"""Checks for models whose parameters are on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...core.errors import InvalidInput
from .tensor_slots import empty_like, list_tensors
from .weights import Weights


def is_on_meta(model: nn.Module) -> bool:
    """Return True if any parameter has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_weights(model: nn.Module, weights: Weights | None) -> None:
    """Check that values are given for a model on meta, and for no other."""
    if is_on_meta(model) and weights is None:
        raise InvalidInput(
            "this model is on the meta device; pass weights=Weights(checkpoint=path) to load its "
            "values, or Weights(seed=0) to initialise them"
        )
    if not is_on_meta(model) and weights is not None:
        raise InvalidInput(
            "weights= is for a model on the meta device, but this one has values; build it under "
            "torch.device('meta'), or omit weights= and use load_checkpoint"
        )


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace buffers that have values by meta tensors while the model is captured.

    Capture needs all tensors on one device. A table that the model's author computed on the CPU is
    put back afterwards.
    """
    real = [
        (slot, each.tensor)
        for each in list_tensors(model)
        if not each.tensor.is_meta
        for slot in each.slots
    ]
    try:
        for slot, tensor in real:
            slot.put(empty_like(tensor, torch.device("meta")))
        yield
    finally:
        for slot, tensor in real:
            slot.put(tensor)
