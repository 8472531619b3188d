"""Links between two groups of devices, where they differ from the level that joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ..document import Name, Record

if TYPE_CHECKING:
    from .cluster import Cluster, LinkLevel

Pair = tuple[int, int]
"""Two groups of a level, by their numbers, the lower one first."""


class PairLink(Record):
    """Link between any device of one group and any of another, in place of their level's.

    Attributes:
        level: Name of the level whose groups it joins, such as ``node``.
        groups: The two groups, by the name of their ``place``, or by their number from 0 where the
            level has a ``group_size``.
        latency_s: One-way delay of an empty message.
        bandwidth_bytes_per_s: Point-to-point, one direction.
        all_reduce_bandwidth_bytes_per_s: As of a level.
    """

    level: Name
    groups: tuple[Name, Name]
    latency_s: float = Field(ge=0)
    bandwidth_bytes_per_s: float = Field(gt=0)
    all_reduce_bandwidth_bytes_per_s: float | None = Field(None, gt=0)

    def scale(self, *, bandwidth_factor: float) -> PairLink:
        """Return the link with its bandwidths multiplied by a factor."""
        summed = self.all_reduce_bandwidth_bytes_per_s
        return self.model_copy(
            update={
                "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s * bandwidth_factor,
                "all_reduce_bandwidth_bytes_per_s": summed and summed * bandwidth_factor,
            }
        )

    def __str__(self) -> str:
        return f"{self.level} {self.groups[0]} and {self.groups[1]}"


def check_pair_links(cluster: Cluster) -> None:
    """Raise `ValueError` unless every pair link joins two groups that meet at the next level."""
    levels = cluster.levels
    names = [level.name for level in levels[:-1]]
    seen: set[tuple[str, frozenset[str]]] = set()
    for link in cluster.links:
        if names.count(link.level) != 1:
            raise ValueError(
                f"a link joins groups of {link.level!r}, which is not the name of one level below "
                f"the outermost; those are {names}"
            )
        level = names.index(link.level)
        around = _groups_around(cluster, level)
        for group in link.groups:
            if group not in around:
                raise ValueError(
                    f"a link joins {link}, but there is no {link.level} {group!r}; there are "
                    f"{', '.join(map(repr, list(around)[:8]))}"
                )
        one, other = link.groups
        if one == other:
            raise ValueError(f"a link joins {link}: give two different groups")
        if around[one] != around[other]:
            raise ValueError(
                f"a link joins {link}, which do not lie in one {levels[level + 1].name}; give the "
                f"link of the groups of {levels[level + 1].name!r} that they lie in"
            )
        if levels[level + 1].shared:
            raise ValueError(
                f"a link joins {link} by itself, but {levels[level + 1].name!r} is shared, one "
                f"connection for all that leaves a {link.level}; give one of the two"
            )
        key = link.level, frozenset(link.groups)
        if key in seen:
            raise ValueError(f"two links join {link}; give one")
        seen.add(key)


def _groups_around(cluster: Cluster, level: int) -> dict[str, int | str]:
    """Return the group of the next level that each group of a level lies in, by name."""
    from .places import group_of

    return {
        str(group_of(cluster, level, device)): group_of(cluster, level + 1, device)
        for device in range(len(cluster.devices))
    }


def list_pair_links(cluster: Cluster) -> tuple[LinkLevel, ...]:
    """Return the pair links as levels, whose formulas they share."""
    from .cluster import LinkLevel

    return tuple(
        LinkLevel(
            name=str(link),
            latency_s=link.latency_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            all_reduce_bandwidth_bytes_per_s=link.all_reduce_bandwidth_bytes_per_s,
        )
        for link in cluster.links
    )


def number_pair_links(
    cluster: Cluster, groups: tuple[tuple[int, ...], ...]
) -> dict[int, dict[Pair, LinkLevel]]:
    """Return the pair links by the level at which they join, and the groups just inside it.

    ``groups`` are the numbers of `list_groups`.
    """
    from .places import group_of

    names = [level.name for level in cluster.levels[:-1]]
    found: dict[int, dict[Pair, LinkLevel]] = {}
    for link, as_level in zip(cluster.links, list_pair_links(cluster), strict=True):
        level = names.index(link.level)
        numbers = {
            str(group_of(cluster, level, device)): group
            for device, group in enumerate(groups[level])
        }
        one, other = sorted(numbers[group] for group in link.groups)
        found.setdefault(level + 1, {})[one, other] = as_level
    return found
