"""Run a forward again as it ran before: the same random numbers, and buffers moved only once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RandomState:
    """Of everything a model may draw from: torch on CPU and on one device, and Python.

    Attributes:
        cpu: torch's CPU generator.
        device: The device's generator; `None` on CPU.
        python: The `random` module.
    """

    cpu: Tensor
    device: Tensor | None
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device, random.getstate())

    def restore(self, device: torch.device) -> None:
        """Draw from here on what was drawn after this state was taken."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)


@contextmanager
def as_before(module: nn.Module, state: RandomState, device: torch.device) -> Iterator[None]:
    """Random numbers are those drawn after ``state``, and buffers end as they began.

    A forward that runs a second time must not move running statistics a second time. They are put
    back behind autograd's back, as batch normalisation moves them: it may have saved them.
    """
    now = RandomState.now(device)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    state.restore(device)
    try:
        yield
    finally:
        now.restore(device)
        for buffer, value in buffers:
            buffer.data.copy_(value)
