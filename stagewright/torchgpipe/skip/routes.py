"""Which skip tensors go from which partition to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from .namespace import Namespace

SkipName = tuple[Namespace | None, str]
"""A skip tensor's namespace, if it has one, and its name in there."""


@dataclass
class SkipRoutes:
    """Skip tensors that leave the partition where they are stashed.

    Attributes:
        ends: The partition that stashes it and the one that pops it, for each.
    """

    ends: dict[SkipName, tuple[int, int]] = field(default_factory=dict)

    def into(self, partition: int) -> tuple[SkipName, ...]:
        """Those popped there, first stashed first."""
        found = [(ends[0], name) for name, ends in self.ends.items() if ends[1] == partition]
        return tuple(name for _, name in sorted(found, key=lambda pair: pair[0]))

    def out_of(self, partition: int) -> tuple[SkipName, ...]:
        """Those stashed there."""
        return tuple(name for name, ends in self.ends.items() if ends[0] == partition)


def skip_routes(partitions: Sequence[nn.Module]) -> SkipRoutes:
    """Look through partitions for the layers that stash and pop, nested ones too."""
    from .skippable import Skippable

    stashed: dict[SkipName, int] = {}
    routes = SkipRoutes()
    for index, partition in enumerate(partitions):
        for layer in partition.modules():
            if not isinstance(layer, Skippable):
                continue
            for name in layer.poppable():
                source = stashed.pop(name, index)
                if source != index:
                    routes.ends[name] = source, index
            stashed.update(dict.fromkeys(layer.stashable(), index))
    return routes
