"""Places of devices: which group of each link level a device lies in.

A level either joins ``group_size`` consecutive devices, or those that name one group as their
``place``. The latter says what the former cannot: groups of different sizes, and a group that has
lost a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from ..errors import InvalidInput

if TYPE_CHECKING:
    from .cluster import Cluster, LinkLevel

NODE, NETWORK = "node", "network"
"""Names of the level inside machines, and of that between machines."""

MAX_SHOWN = 4
"""Most runs of group sizes shown of a level."""


def group_of(cluster: Cluster, level: int, device: int) -> int | str:
    """Return the group of a device at a level, as a number or by name."""
    link = cluster.levels[level]
    if link.group_size is not None:
        return device // link.group_size
    return cluster.devices[device].place.get(link.name, "")


def list_groups(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return each device's group at each level, numbered by first appearance: [level][device]."""
    return tuple(_number(cluster, level) for level in range(len(cluster.levels)))


def _number(cluster: Cluster, level: int) -> tuple[int, ...]:
    numbers: dict[int | str, int] = {}
    count, size = len(cluster.devices), cluster.levels[level].group_size
    if size is not None:
        return tuple(device // size for device in range(count))
    groups = (group_of(cluster, level, device) for device in range(count))
    return tuple(numbers.setdefault(group, len(numbers)) for group in groups)


def list_nodes(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the devices of each machine, as indices in the cluster.

    Machines are the groups of the level named ``node``, else of the innermost of several levels.
    The only level is a machine, or, as ``network``, has a device on each.
    """
    names = [level.name for level in cluster.levels]
    devices = range(len(cluster.devices))
    if NODE not in names and len(names) < 2:
        return [(device,) for device in devices] if NETWORK in names else [tuple(devices)]
    members: dict[int, list[int]] = {}
    for device, group in enumerate(_number(cluster, names.index(NODE) if NODE in names else 0)):
        members.setdefault(group, []).append(device)
    return list(map(tuple, members.values()))


def largest_groups(cluster: Cluster) -> tuple[int, ...]:
    """Return the devices in the largest group of each level; ``group_size`` where it is given."""
    return tuple(
        link.group_size or max(Counter(_number(cluster, level)).values())
        for level, link in enumerate(cluster.levels)
    )


def list_sizes(cluster: Cluster) -> list[str]:
    """Describe the group sizes of each level in words: ``8``, or ``2 x 8, 7, 8``."""
    return [
        str(link.group_size) if link.group_size else _runs(_number(cluster, level))
        for level, link in enumerate(cluster.levels)
    ]


def _runs(groups: Sequence[int]) -> str:
    sizes = list(Counter(groups).values())
    if len(set(sizes)) == 1:
        return str(sizes[0])
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    shown = [f"{count} x {size}" if count > 1 else str(size) for size, count in runs[:MAX_SHOWN]]
    return ", ".join(shown) + ", ..." * (len(runs) > MAX_SHOWN)


def remove_devices(cluster: Cluster, devices: Sequence[int | str]) -> Cluster:
    """Return the cluster without some devices, each other in its place; see `Cluster.without`."""
    names = {device.name: index for index, device in enumerate(cluster.devices)}
    removed = set()
    for device in devices:
        index = names.get(device, -1) if isinstance(device, str) else device
        if not 0 <= index < len(names):
            raise InvalidInput(
                f"there is no device {device!r}; the cluster has {len(names)}, from "
                f"{cluster.devices[0].name!r} to {cluster.devices[-1].name!r}",
                field="/devices",
            )
        removed.add(index)
    if len(removed) == len(names):
        raise InvalidInput(f"none of the cluster's {len(names)} devices would be left")
    if not removed:
        return cluster
    levels = _name_uniquely(cluster.levels)
    # A device that is alone has no links, and so no places.
    is_alone = len(names) - len(removed) == 1
    left = tuple(
        device.model_copy(
            update={"place": {} if is_alone else _spell_place(cluster, levels, index)}
        )
        for index, device in enumerate(cluster.devices)
        if index not in removed
    )
    # The outermost level joins what is left, however much it joined.
    spelt = [link.model_copy(update={"group_size": None}) for link in levels]
    if len(left) == 1:
        return type(cluster)(devices=left)
    kept = {(name, group) for device in left for name, group in device.place.items()}
    links = [
        link for link in cluster.links if all((link.level, group) in kept for group in link.groups)
    ]
    return type(cluster)(
        devices=left,
        levels=tuple(spelt),
        links=tuple(links),
        assumptions=cluster.assumptions,
    )


def _spell_place(cluster: Cluster, levels: Sequence[LinkLevel], device: int) -> dict[str, str]:
    inner = enumerate(levels[:-1])
    return {link.name: str(group_of(cluster, level, device)) for level, link in inner}


def _name_uniquely(levels: Sequence[LinkLevel]) -> list[LinkLevel]:
    """Return the levels, those that repeat an inner one's name with a number behind it."""
    found: list[LinkLevel] = []
    for link in levels:
        name, number = link.name, 1
        while name in {other.name for other in found}:
            number += 1
            name = f"{link.name} {number}"
        found.append(link.model_copy(update={"name": name}))
    return found


def check_places(cluster: Cluster) -> None:
    """Raise `ValueError` unless every device has one group of each level, and groups nest."""
    devices, levels = cluster.devices, cluster.levels
    sizes = [link.group_size for link in levels]
    # Where sizes are given, a device's group is found by integer division alone.
    given = [size for size in sizes if size is not None]
    if any(inner >= outer or outer % inner for inner, outer in pairwise(given)):
        raise ValueError(
            f"levels go from innermost to outermost, each a multiple of the one before; "
            f"found group sizes {given}"
        )
    outermost = sizes[-1] if sizes else 0
    if len(devices) > 1 and outermost is not None and outermost < len(devices):
        raise ValueError(
            f"the outermost level must join all {len(devices)} devices; found group "
            f"sizes {sizes}: give the links as 'levels', innermost first, such as "
            f'[{{"group_size": {len(devices)}}}] (docs/guides/clusters.md)'
        )
    _check_names(cluster)
    if None in sizes[:-1]:
        _check_nesting(cluster)


def _check_names(cluster: Cluster) -> None:
    """Check that places and the levels without a group size name each other."""
    placed = [link.name for link in cluster.levels if link.group_size is None]
    repeated = [name for name, count in Counter(placed).items() if count > 1]
    if repeated:
        raise ValueError(f"two levels are named {repeated[0]!r}; places need names of their own")
    required = {link.name for link in cluster.levels[:-1] if link.group_size is None}
    for device in cluster.devices:
        for name in sorted(set(device.place) - required):
            raise ValueError(
                f"device {device.name!r} has a place in {name!r}, but no level without a "
                f"group_size has that name, below the outermost, which joins all devices; the "
                f"levels are {[link.name for link in cluster.levels]}"
            )
        for name in sorted(required - set(device.place)):
            raise ValueError(
                f"level {name!r} has no group_size, and device {device.name!r} no place in it; "
                f'give one of the two, such as "place": {{{name!r}: "0"}}'
            )


def _check_nesting(cluster: Cluster) -> None:
    """Check that all devices of a group lie in one group of the next level."""
    for level in range(len(cluster.levels) - 1):
        inner, outer = cluster.levels[level], cluster.levels[level + 1]
        lies_in: dict[int | str, int | str] = {}
        for device in range(len(cluster.devices)):
            group, around = group_of(cluster, level, device), group_of(cluster, level + 1, device)
            if lies_in.setdefault(group, around) != around:
                raise ValueError(
                    f"{inner.name} {group!r} has devices in two groups of {outer.name!r}, "
                    f"{lies_in[group]!r} and {around!r}; a group lies inside one of the next level"
                )
