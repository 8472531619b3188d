"""Models whose parameters are on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...core.errors import InvalidInput
from .tensor_slots import empty_like, list_tensors
from .weights import Weights


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_weights(model: nn.Module, weights: Weights | None) -> None:
    """See that there are values for a model without memory, and for no other.

    Raises:
        InvalidInput: There are none, or the model has its own.
    """
    if is_on_meta(model) and weights is None:
        raise InvalidInput(
            "this model is on the meta device; say where its values come from: "
            "weights=Weights(checkpoint=path), or Weights(seed=0) to initialise it"
        )
    if not is_on_meta(model) and weights is not None:
        raise InvalidInput(
            "weights= is for a model on the meta device, and this one has values; build it under "
            "torch.device('meta'), or leave weights= out and use load_checkpoint"
        )


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, buffers that have values are on the meta device like everything else.

    A model is captured on one device; a table that its author computed on the CPU waits outside.
    """
    real = [
        (place, slot.tensor)
        for slot in list_tensors(model)
        if not slot.tensor.is_meta
        for place in slot.places
    ]
    try:
        for place, tensor in real:
            place.put(empty_like(tensor, torch.device("meta")))
        yield
    finally:
        for place, tensor in real:
            place.put(tensor)
