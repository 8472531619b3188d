"""The generators a stage draws random numbers from, so that a second run draws the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The CPU's generators are one for the whole process, and backwards of several devices are threads.
_lock = threading.RLock()


@dataclass(frozen=True)
class Generators:
    """Where generators stood.

    Attributes:
        cpu: torch's on the CPU and Python's `random`; `None` if nothing was drawn from them.
        gpu: That of the stage's GPU, if it is on one.
    """

    cpu: tuple[Tensor, Any] | None
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Where they stand."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls((torch.get_rng_state(), random.getstate()), gpu)

    def restore(self, device: torch.device) -> None:
        """Draw from here on what was drawn after this was taken."""
        if self.cpu is not None:
            torch.set_rng_state(self.cpu[0])
            random.setstate(self.cpu[1])
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)

    def where_drawn(self, device: torch.device) -> Generators:
        """Without those that still stand where they stood: others may use them meanwhile."""
        now = Generators.now(device)
        assert self.cpu is not None
        assert now.cpu is not None
        same = self.cpu[1] == now.cpu[1] and torch.equal(self.cpu[0], now.cpu[0])
        return Generators(None if same else self.cpu, self.gpu)


@contextmanager
def drawing_from(then: Generators, device: torch.device) -> Iterator[None]:
    """Draw inside what was drawn after ``then``; generators do not move by it."""
    with _lock if then.cpu is not None else nullcontext():
        now = Generators.now(device)
        then.restore(device)
        try:
            yield
        finally:
            Generators(now.cpu if then.cpu is not None else None, now.gpu).restore(device)
