"""What layers hold together, counted as the planner counts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.profile.profile import Profile
from ..planner.cost.chain import parameters_of


class Held:
    """Bytes of any layers of a profile; what several of them share counts once."""

    def __init__(self, profile: Profile) -> None:
        count = len(profile.layers)
        weights = [(entry.size_bytes, entry.layers) for entry in parameters_of(profile)]
        kept = [(entry.size_bytes, entry.layers) for entry in profile.storages] or [
            (entry.saved_activation_bytes, (index,)) for index, entry in enumerate(profile.layers)
        ]
        self._weights = _by_layer(weights, count)
        self._kept = _by_layer(kept, count)

    def weights_bytes(self, layers: Iterable[int]) -> int:
        """Parameters and buffers, as `Plan` has them in `weights_bytes` of a stage."""
        return _sum(self._weights, layers)

    def saved_bytes(self, layers: Iterable[int]) -> int:
        """Activations that stay for the backward of one micro-batch, the loss left out."""
        return _sum(self._kept, layers)


def _by_layer(
    items: Sequence[tuple[int, tuple[int, ...]]], num_layers: int
) -> list[list[tuple[int, int]]]:
    """Of each layer what it uses: number and bytes."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
    for number, (size_bytes, layers) in enumerate(items):
        for layer in layers:
            found[layer].append((number, size_bytes))
    return found


def _sum(used: Sequence[Sequence[tuple[int, int]]], layers: Iterable[int]) -> int:
    return sum(size for _, size in {item for layer in layers for item in used[layer]})
