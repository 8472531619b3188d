"""Models whose parameters are on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .slots import empty_like, slots_of


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """Inside, buffers that have values are on the meta device like everything else.

    A model is captured on one device; a table that its author computed on the CPU waits outside.
    """
    real = [
        (place, slot.tensor)
        for slot in slots_of(model)
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
