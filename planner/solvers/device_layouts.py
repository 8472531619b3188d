"""Ways to spread equal stages over devices of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from ..cost.assignment import Assignment, in_device_order
from ..cost.device_classes import Devices

MAX_ORDERED = 3
"""Classes whose every order is tried; further ones are used in their own order alone."""

MAX_SPLIT = 12
"""Stages up to which every division of them between two classes is tried."""

MAX_ROWS = 64
"""Rows of classes up to which every one is tried."""

Row = tuple[int, ...]
"""The class of each stage."""


def spreads(
    count: int, replicas: int, devices: Devices, kinds: Sequence[str] = ()
) -> Iterator[Assignment]:
    """So many stages of equally many devices each, placed in different ways.

    On each class alone; on one class after another, each filled before the next begins; every
    division between two classes; the cluster's own order; with few stages and classes, every row
    of classes; and the kinds that pinned layers need, in the order of the layers. Cuts are
    stand-ins.

    Args:
        count: Stages.
        replicas: Devices of each.
        devices: Where they are placed.
        kinds: That some layers need, in their order, none twice in a row.
    """
    rooms = [_room(number, count, replicas, devices) for number in range(len(devices.classes))]
    for row in dict.fromkeys(_rows(count, replicas, devices, rooms, kinds)):
        made = _placed(row, replicas, devices, rooms) if len(row) == count else None
        if made is not None:
            yield made


def _rows(
    count: int, replicas: int, devices: Devices, rooms: Sequence[int], kinds: Sequence[str]
) -> Iterator[Row]:
    numbers = range(len(rooms))
    for number in numbers:
        yield (number,) * count
    if len(numbers) == 1:
        return
    if kinds:
        yield from _of_kinds(count, devices, rooms, kinds)
    front, rest = numbers[:MAX_ORDERED], numbers[MAX_ORDERED:]
    for order in permutations(front):
        yield _filled([*order, *rest], rooms, count)
    if count <= MAX_SPLIT:
        for one, other in permutations(front, 2):
            for first in range(1, count):
                yield (one,) * first + (other,) * (count - first)
    if replicas == 1:
        ordered = in_device_order(tuple(range(count + 1)), devices)
        if ordered is not None:
            yield ordered.classes
    if len(numbers) ** count <= MAX_ROWS:
        yield from product(numbers, repeat=count)


def _room(number: int, most: int, replicas: int, devices: Devices) -> int:
    """Stages that the devices of a class have room for, at most so many."""
    most = min(most, len(devices.classes[number]) // replicas)
    while most and _in_class(number, most, replicas, devices) is None:
        most -= 1
    return most


def _filled(order: Sequence[int], rooms: Sequence[int], count: int) -> Row:
    row: list[int] = []
    for number in order:
        row += [number] * min(rooms[number], count - len(row))
    return tuple(row)


def _of_kinds(
    count: int, devices: Devices, rooms: Sequence[int], kinds: Sequence[str]
) -> Iterator[Row]:
    """A run of stages for each kind; the longest run is each of them once."""
    free = list(rooms)
    row: list[list[int]] = [[] for _ in kinds]

    def add(place: int) -> bool:
        for number, entry in enumerate(devices.classes):
            if entry.kind == kinds[place] and free[number]:
                free[number] -= 1
                row[place].append(number)
                return True
        return False

    if count < len(kinds) or not all(add(place) for place in range(len(kinds))):
        return
    for longest in range(len(kinds)):
        kept_free, kept_row = list(free), [list(run) for run in row]
        for place in [longest, *(other for other in range(len(kinds)) if other != longest)]:
            while sum(map(len, row)) < count and add(place):
                pass
        yield tuple(number for run in row for number in sorted(run))
        free[:], row[:] = kept_free, kept_row


def _placed(row: Row, replicas: int, devices: Devices, rooms: Sequence[int]) -> Assignment | None:
    """Stages on their classes; `None` where one of these has no room."""
    ends = [0] * len(row)
    for number in set(row):
        members = [stage for stage, entry in enumerate(row) if entry == number]
        if len(members) > rooms[number]:
            return None
        found = _in_class(number, len(members), replicas, devices)
        if found is None:
            return None
        for stage, end in zip(members, found, strict=True):
            ends[stage] = end
    return Assignment(
        cuts=tuple(range(len(row) + 1)),
        replicas=(replicas,) * len(row),
        classes=row,
        ends=tuple(ends),
        recompute=(False,) * len(row),
    )


def _in_class(number: int, count: int, replicas: int, devices: Devices) -> tuple[int, ...] | None:
    """Where the stages end on the first devices of a class that take them; `None` if none do."""
    entry = devices.classes[number]
    for last in range(count * replicas, len(entry) + 1):
        ends: list[int] = []
        while len(ends) < count:
            free = ends[-1] - replicas if ends else last
            end = entry.place(free, replicas, is_last=not ends)
            if end < replicas:
                break
            ends.append(end)
        else:
            return tuple(reversed(ends))
    return None
