"""The random generators of a rank: what dropout and shuffling go on from."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from .checkpoint_files.manifest import Checkpoint, random_key

Generator = Literal["cpu", "cuda"]
Generators = tuple[Generator, ...]


def random_tensors(rank: int) -> dict[Generator, tuple[str, Tensor]]:
    """The state of each of this rank's generators, with its key."""
    found: dict[Generator, tuple[str, Tensor]] = {
        "cpu": (random_key(rank, "cpu"), torch.get_rng_state())
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = (random_key(rank, "cuda"), torch.cuda.get_rng_state())
    return found


def random_room(record: Checkpoint, rank: int, num_ranks: int) -> dict[Generator, Tensor]:
    """Tensors for the saved states of this rank's generators.

    Raises:
        InvalidInput: They were not saved, or by another number of ranks.
    """
    if not record.random:
        raise InvalidInput(
            "the checkpoint has no random generators; save with random_state=True, or load without"
        )
    if len(record.random) != num_ranks:
        raise InvalidInput(
            f"the random generators are those of {len(record.random)} ranks, here are "
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
    """Set this rank's generators."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
