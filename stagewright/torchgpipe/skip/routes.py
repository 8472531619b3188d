"""Routes of skip tensors between partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from .namespace import Namespace

SkipName = tuple[Namespace | None, str]
"""Namespace of a skip tensor, if it has one, and its name in it."""


@dataclass
class SkipRoutes:
    """Routes of the skip tensors that cross partitions.

    Attributes:
        ends: The stashing and the popping partition of each skip tensor.
    """

    ends: dict[SkipName, tuple[int, int]] = field(default_factory=dict)

    def into(self, partition: int) -> tuple[SkipName, ...]:
        """Return the skip tensors popped in a partition, in the order of stashing partitions."""
        found = [(ends[0], name) for name, ends in self.ends.items() if ends[1] == partition]
        return tuple(name for _, name in sorted(found, key=lambda pair: pair[0]))

    def out_of(self, partition: int) -> tuple[SkipName, ...]:
        """Return the skip tensors stashed in a partition for later ones."""
        return tuple(name for name, ends in self.ends.items() if ends[0] == partition)


def skip_routes(partitions: Sequence[nn.Module]) -> SkipRoutes:
    """Find the routes between the layers of partitions, nested layers included."""
    # Not at the top: `skippable` imports this module.
    from .skippable import Skippable

    stashed: dict[SkipName, int] = {}
    routes = SkipRoutes()
    for index, partition in enumerate(partitions):
        for layer in partition.modules():
            if not isinstance(layer, Skippable):
                continue
            for name in layer.poppable():
                source = stashed.pop(name, index)
                # Within a partition, the tracker passes the tensor, and no route is needed.
                if source != index:
                    routes.ends[name] = source, index
            stashed.update(dict.fromkeys(layer.stashable(), index))
    return routes
