"""Totals over sets of layers: times, memory and shares of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .pool import total_time_s
from .profile import Profile


@dataclass(frozen=True)
class LayerTotals:
    """Totals of a set of layers, in which tied weights and shared storages count once."""

    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def memory_bytes(self) -> int:
        return self.parameter_bytes + self.activation_bytes


class ProfileTotals:
    """Totals over any set of one profile's layers."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._weights = [one for one in profile.parameters if one.kind == "parameter"]
        self._weights_of = _by_layer([one.layers for one in self._weights], len(profile.layers))
        self._kept_of = _by_layer([one.layers for one in profile.storages], len(profile.layers))
        self.whole = self.of(range(len(profile.layers)))
        self.whole_time_s = total_time_s(profile)

    def of(self, layers: Sequence[int]) -> LayerTotals:
        entries = [self._profile.layers[index] for index in layers]
        storages = self._profile.storages
        # Sets, because layers share weights and storages, and each is in memory once.
        weights = {place for index in layers for place in self._weights_of[index]}
        kept = {place for index in layers for place in self._kept_of[index]}
        return LayerTotals(
            forward_s=sum(entry.forward.median_s for entry in entries),
            backward_s=sum(entry.backward.median_s for entry in entries),
            parameter_bytes=sum(self._weights[place].size_bytes for place in weights)
            # Profiles of other tools may list neither weights nor storages. Only the layers' own
            # figures are left then, in which shared ones count for every layer.
            if self._weights
            else sum(entry.layer.parameter_bytes for entry in entries),
            activation_bytes=sum(storages[place].size_bytes for place in kept)
            if storages
            else sum(entry.saved_activation_bytes for entry in entries),
        )

    def time_share(self, costs: LayerTotals) -> float:
        """Return the share of the time of all layers and the loss."""
        return costs.time_s / self.whole_time_s if self.whole_time_s else 0.0

    def memory_share(self, costs: LayerTotals) -> float:
        """Return the share of all parameters and activations."""
        return costs.memory_bytes / self.whole.memory_bytes if self.whole.memory_bytes else 0.0


def _by_layer(users: Sequence[Sequence[int]], num_layers: int) -> list[list[int]]:
    """Return for each layer the positions in ``users`` that list it."""
    found: list[list[int]] = [[] for _ in range(num_layers)]
    for place, layers in enumerate(users):
        for index in layers:
            found[index].append(place)
    return found
