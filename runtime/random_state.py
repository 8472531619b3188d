"""State of a rank's random generators: saved, restored and replayed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..core.errors import InvalidInput
from .checkpoint_files.manifest import Checkpoint, random_key

Generator = Literal["cpu", "cuda"]
Generators = tuple[Generator, ...]


def collect_random_states(rank: int) -> dict[Generator, tuple[str, Tensor]]:
    """Return the state of each of this rank's generators, with its checkpoint key."""
    found: dict[Generator, tuple[str, Tensor]] = {
        "cpu": (random_key(rank, "cpu"), torch.get_rng_state())
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = (random_key(rank, "cuda"), torch.cuda.get_rng_state())
    return found


def allocate_random_states(
    record: Checkpoint, rank: int, num_ranks: int
) -> dict[Generator, Tensor]:
    """Allocate tensors for the saved states of this rank's generators."""
    if not record.random:
        raise InvalidInput(
            "the checkpoint has no random state; save with random_state=True, or load without it"
        )
    if len(record.random) != num_ranks:
        raise InvalidInput(
            f"the random state was saved by {len(record.random)} ranks, but there are now "
            f"{num_ranks}; load with random_state=False, and seed the ranks yourself"
        )
    room: dict[Generator, Tensor] = {}
    for generator in record.random[rank]:
        if generator == "cpu":
            room[generator] = torch.empty_like(torch.get_rng_state())
        elif torch.cuda.is_available():
            room[generator] = torch.empty_like(torch.cuda.get_rng_state())
    return room


def restore(states: dict[Generator, Tensor]) -> None:
    """Restore this rank's generators."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


@dataclass(frozen=True)
class RandomState:
    """State of every generator a model may draw from: torch's on CPU and a device, and Python's.

    Attributes:
        cpu: State of torch's CPU generator.
        device: State of the device's generator; `None` on CPU.
        python: State of the `random` module.
    """

    cpu: Tensor
    device: Tensor | None
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device, random.getstate())

    def restore(self, device: torch.device) -> None:
        """Restore the generators, so that they repeat what followed this state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)


@contextmanager
def replayed_random_state(
    module: nn.Module, state: RandomState, device: torch.device
) -> Iterator[None]:
    """Replay the random numbers that followed ``state``, and leave buffers as they are, inside.

    A recomputed forward must not move running statistics a second time. They are restored through
    ``.data``, as batch normalisation moves them: autograd may have saved these buffers, and would
    take a counted change for a corrupted backward.
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
