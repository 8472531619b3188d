"""State of the random generators a model draws from: recorded, restored and replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture.observation.preserve import get_numpy_state, set_numpy_state


@dataclass(frozen=True)
class RandomState:
    """State of every generator a model may draw from: torch's, Python's and numpy's.

    Attributes:
        cpu: States of torch's CPU generator, and of those of `random` and ``numpy.random``; `None`
            leaves all alone.
        device: State of the device's generator; `None` on CPU.
    """

    cpu: tuple[Tensor, Any] | None
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls((torch.get_rng_state(), (random.getstate(), get_numpy_state())), on_device)

    def restore(self, device: torch.device) -> None:
        """Restore the generators, so that they repeat what followed this state."""
        if self.cpu is not None:
            torch_state, (python_state, numpy_state) = self.cpu
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            set_numpy_state(numpy_state)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore every random generator to its present state when the block ends."""
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore(device)


@contextmanager
def replay_random_state(state: RandomState, device: torch.device) -> Iterator[None]:
    """Replay the random numbers that followed ``state`` inside the block."""
    with preserve_random_state(device):
        state.restore(device)
        yield
