"""Memory of a range of layers, counted as the planner counts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.profile.profile import Profile
from ..planner.cost.chain import parameters_of


class LayerMemory:
    """Memory of any set of a profile's layers; what several share counts once."""

    def __init__(self, profile: Profile) -> None:
        count = len(profile.layers)
        weights = [(entry.size_bytes, entry.layers) for entry in parameters_of(profile)]
        kept = [(entry.size_bytes, entry.layers) for entry in profile.storages] or [
            (entry.saved_activation_bytes, (index,)) for index, entry in enumerate(profile.layers)
        ]
        self._weights = _by_layer(weights, count)
        self._kept = _by_layer(kept, count)

    def weights_bytes(self, layers: Iterable[int]) -> int:
        """Sum parameters and buffers, as `weights_bytes` of a plan's stage does."""
        return _sum(self._weights, layers)

    def saved_bytes(self, layers: Iterable[int]) -> int:
        """Sum the activations kept for the backward of one micro-batch, without the loss."""
        return _sum(self._kept, layers)


def _by_layer(
    items: Sequence[tuple[int, tuple[int, ...]]], num_layers: int
) -> list[list[tuple[int, int]]]:
    """List for each layer the items it uses, as number and bytes."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
    for number, (size_bytes, layers) in enumerate(items):
        for layer in layers:
            found[layer].append((number, size_bytes))
    return found


def _sum(used: Sequence[Sequence[tuple[int, int]]], layers: Iterable[int]) -> int:
    # A set of (number, bytes): an item that several of the layers share counts once.
    return sum(size for _, size in {item for layer in layers for item in used[layer]})
