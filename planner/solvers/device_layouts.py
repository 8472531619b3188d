"""Layouts of equal stages over devices of several kinds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import permutations

from ..cost.assignment import Assignment
from ..cost.device_classes import Devices

MAX_ORDERED = 3
"""Classes up to which every order is tried; further ones stay in their own order."""

Row = tuple[int, ...]
"""The class of each stage."""


def list_device_layouts(
    count: int, replicas: int, devices: Devices, kinds: Sequence[str] = ()
) -> Iterator[Assignment]:
    """Yield placements of stages with equally many devices each; cuts are placeholders.

    They use each class alone; one class after another, each filled before the next begins; and the
    ``kinds`` that pinned layers need, in the order of the layers, without repetitions.
    """
    rooms = [_room(number, count, replicas, devices) for number in range(len(devices.classes))]
    # Several rules make equal rows; each is tried once, in order of the first.
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


def _room(number: int, most: int, replicas: int, devices: Devices) -> int:
    """Return the number of stages, up to ``most``, that fit on the devices of a class."""
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
    """Yield rows with a run of stages for each kind, each run in turn being the longest."""
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
    # Spare stages extend the longest run as far as its class has room, then the others.
    for longest in range(len(kinds)):
        kept_free, kept_row = list(free), [list(run) for run in row]
        for place in [longest, *(other for other in range(len(kinds)) if other != longest)]:
            while sum(map(len, row)) < count and add(place):
                pass
        yield tuple(number for run in row for number in sorted(run))
        free[:], row[:] = kept_free, kept_row


def _placed(row: Row, replicas: int, devices: Devices, rooms: Sequence[int]) -> Assignment | None:
    """Place stages on their classes; return `None` if a class lacks room."""
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
    """Return where stages end on the first devices of a class that hold them; `None` if none do."""
    entry = devices.classes[number]

    def place(last: int) -> tuple[int, ...] | None:
        # From the last stage to the first, as `DeviceClass.place` does.
        ends: list[int] = []
        while len(ends) < count:
            free = ends[-1] - replicas if ends else last
            end = entry.place(free, replicas, is_last=not ends)
            if end < replicas:
                return None
            ends.append(end)
        return tuple(reversed(ends))

    # Groups may leave gaps; what fits below some device fits below every later one.
    lasts = range(count * replicas, len(entry) + 1)
    first = bisect_left(lasts, True, key=lambda last: place(last) is not None)
    return place(lasts[first]) if first < len(lasts) else None
