"""The choices a plan makes, without any costs, and ways to build them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .chain import Order
from .device_classes import Devices

Cuts = tuple[int, ...]
"""Layers of S stages: 0, the first layer of every later stage, and L."""


@dataclass(frozen=True, order=True)
class Assignment:
    """Stages and where they run.

    Attributes:
        cuts: Where stages begin, and the number of layers.
        replicas: Devices of each stage.
        classes: Device class of each stage.
        ends: Where each stage's devices end among those of its class.
        recompute: Whether each stage is recomputed.
        extra_depths: Forwards each stage runs ahead beyond the schedule's warm-up; empty for none.
        chunks: Stages a device.
        order: The profile's layer at each place, which ``cuts`` count; empty for its own order.
    """

    cuts: Cuts
    replicas: tuple[int, ...]
    classes: tuple[int, ...]
    ends: tuple[int, ...]
    recompute: tuple[bool, ...]
    extra_depths: tuple[int, ...] = ()
    chunks: int = 1
    order: Order = ()

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    def device_indices(self, devices: Devices, stage: int) -> tuple[int, ...]:
        """Return the cluster indices of the devices that run a stage."""
        end, count = self.ends[stage], self.replicas[stage]
        return devices.classes[self.classes[stage]].devices[end - count : end]


def to_cuts(counts: Sequence[int]) -> Cuts:
    """Return the cuts between stages with these layer counts."""
    return (0, *accumulate(counts))


def count_layers(cuts: Cuts) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    return tuple(last - first for first, last in pairwise(cuts))


def shift_forward(assignment: Assignment, devices: Devices) -> Assignment:
    """Move each class's stages to its earliest devices that leave their grouping unchanged."""
    ends = list(assignment.ends)
    for number, entry in enumerate(devices.classes):
        members = [s for s, owner in enumerate(assignment.classes) if owner == number]
        if not members:
            continue
        step = max(entry.group_sizes[:-1], default=1)
        start = min(assignment.ends[s] - assignment.replicas[s] for s in members)
        last = max(members, key=lambda s: assignment.ends[s])
        shift = start // step * step
        if shift and all(
            entry.place(ends[s] - shift, assignment.replicas[s], is_last=s == last)
            == ends[s] - shift
            for s in members
        ):
            for s in members:
                ends[s] -= shift
    moved = tuple(ends)
    return assignment if moved == assignment.ends else replace(assignment, ends=moved)


def place_stages(
    cuts: Cuts,
    replicas: Sequence[int],
    devices: Devices,
    *,
    classes: Sequence[int] = (),
    recompute: Sequence[bool] = (),
) -> Assignment | None:
    """Place stages on their classes' devices, last stage first; return None if they do not fit.

    Without ``classes`` all are placed on the first one.
    """
    classes = tuple(classes) or (0,) * len(replicas)
    free: dict[int, int] = {}
    ends: list[int] = []
    for number, count in zip(reversed(classes), reversed(replicas), strict=True):
        entry = devices.classes[number]
        left = free.get(number, len(entry))
        end = entry.place(left, count, is_last=number not in free) if count <= left else -1
        if end < count:
            return None
        ends.append(end)
        free[number] = end - count
    found = Assignment(
        cuts=cuts,
        replicas=tuple(replicas),
        classes=classes,
        ends=tuple(reversed(ends)),
        recompute=tuple(recompute) or (False,) * len(replicas),
    )
    return shift_forward(found, devices)


def place_on(cuts: Cuts, placed: Sequence[Sequence[int]], devices: Devices) -> Assignment | None:
    """Place each stage on given devices of the cluster, an index for each replica.

    Return None if a stage has devices that are not consecutive ones of one class, or unknown ones.
    """
    owner = {
        index: (number, rank)
        for number, entry in enumerate(devices.classes)
        for rank, index in enumerate(entry.devices)
    }
    held = [[owner.get(index, (-1, -1)) for index in indices] for indices in placed]
    if any(each[0][0] < 0 for each in held) or any(
        (number, one + 1) != after for each in held for (number, one), after in pairwise(each)
    ):
        return None
    return Assignment(
        cuts=cuts,
        replicas=tuple(map(len, held)),
        classes=tuple(each[-1][0] for each in held),
        ends=tuple(each[-1][1] + 1 for each in held),
        recompute=(False,) * len(held),
    )


def place_in_device_order(cuts: Cuts, devices: Devices) -> Assignment | None:
    """Place stage s on a device of the class of device s; return None if there are too few.

    It is device s itself, but where a class counts its devices in another order.
    """
    count = len(cuts) - 1
    if count > len(devices.cluster.devices):
        return None
    owner = list_in_device_order(devices)
    return Assignment(
        cuts=cuts,
        replicas=(1,) * count,
        classes=tuple(number for number, _ in owner[:count]),
        ends=tuple(rank + 1 for _, rank in owner[:count]),
        recompute=(False,) * count,
    )


def list_in_device_order(devices: Devices) -> list[tuple[int, int]]:
    """List the class of each device of the cluster, and the next rank in that class."""
    owner = sorted(
        (device, number) for number, entry in enumerate(devices.classes) for device in entry.devices
    )
    used = [0] * len(devices.classes)
    found = []
    for _, number in owner:
        found.append((number, used[number]))
        used[number] += 1
    return found


def repeat_rounds(one: Assignment, cuts: Cuts, chunks: int, *, folds: bool) -> Assignment:
    """Extend a one-stage-per-device assignment to several stages per device, one per round.

    With ``folds`` the second round runs back, as in a V.
    """
    classes, ends = one.classes, one.ends
    for _ in range(1, chunks):
        classes += one.classes[::-1] if folds else one.classes
        ends += one.ends[::-1] if folds else one.ends
    return replace(
        one,
        cuts=cuts,
        replicas=one.replicas * chunks,
        classes=classes,
        ends=ends,
        recompute=one.recompute * chunks,
        chunks=chunks,
    )
