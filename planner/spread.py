"""Ways to spread equal stages over devices of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from .assignment import Assignment, in_device_order, placed
from .classes import Devices

MAX_ORDERED = 3
"""Classes whose every order is tried; further ones are used in their own order alone."""

MAX_SPLIT = 12
"""Stages up to which every division of them between two classes is tried."""

Part = tuple[int, int]
"""A class and how many stages in a row it takes."""


def spreads(count: int, replicas: int, devices: Devices) -> Iterator[Assignment]:
    """So many stages of equally many devices each, placed in different ways.

    On each class alone; on one class after another, each filled before the next begins; every
    division between two classes; and in the cluster's own order. Cuts are stand-ins.
    """
    found: dict[Assignment, None] = {}
    for parts in _parts(count, replicas, devices):
        made = _joined(parts, replicas, devices)
        if made is not None:
            found.setdefault(made)
    if replicas == 1:
        ordered = in_device_order(tuple(range(count + 1)), devices)
        if ordered is not None:
            found.setdefault(ordered)
    yield from found


def _parts(count: int, replicas: int, devices: Devices) -> Iterator[tuple[Part, ...]]:
    numbers = range(len(devices.classes))
    for number in numbers:
        yield ((number, count),)
    if len(numbers) == 1:
        return
    rooms = [_room(number, count, replicas, devices) for number in numbers]
    front, rest = numbers[:MAX_ORDERED], numbers[MAX_ORDERED:]
    for order in permutations(front):
        yield _filled([*order, *rest], rooms, count)
    if count <= MAX_SPLIT:
        for one, other in permutations(front, 2):
            for first in range(1, count):
                yield ((one, first), (other, count - first))


def _room(number: int, most: int, replicas: int, devices: Devices) -> int:
    """Stages that the devices of a class have room for, at most so many."""
    most = min(most, len(devices.classes[number]) // replicas)
    while most and _joined(((number, most),), replicas, devices) is None:
        most -= 1
    return most


def _filled(order: Sequence[int], rooms: Sequence[int], count: int) -> tuple[Part, ...]:
    parts = []
    for number in order:
        taken = min(rooms[number], count)
        if taken:
            parts.append((number, taken))
        count -= taken
    return () if count else tuple(parts)


def _joined(parts: Sequence[Part], replicas: int, devices: Devices) -> Assignment | None:
    """The parts behind each other; `None` if one of them has no room."""
    classes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    for number, count in parts:
        made = placed(tuple(range(count + 1)), (replicas,) * count, devices, class_index=number)
        if made is None:
            return None
        classes, ends = classes + made.classes, ends + made.ends
    if not classes:
        return None
    return Assignment(
        cuts=tuple(range(len(classes) + 1)),
        replicas=(replicas,) * len(classes),
        classes=classes,
        ends=ends,
        recompute=(False,) * len(classes),
    )
