"""Run a module without its buffers noticing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def buffers_aside(module: nn.Module) -> Iterator[None]:
    """The module works on copies of its buffers inside, and has its own again afterwards.

    Copies rather than values put back: batch normalisation's native operation changes running
    statistics without counting it as a change, so that nothing tells which to put back; and what
    is written after autograd has saved it makes the backward fail.
    """
    copies: dict[Tensor, Tensor] = {}
    places: list[tuple[nn.Module, str, Tensor]] = []
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                places.append((part, name, buffer))
                copies.setdefault(buffer, buffer.clone())
    try:
        for part, name, buffer in places:
            part._buffers[name] = copies[buffer]
        yield
    finally:
        for part, name, buffer in places:
            part._buffers[name] = buffer
