"""Moves of the local search: plans that differ from one in a cut, in devices or in one stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from ..cost.assignment import Assignment, Cuts, place_stages
from ..cost.chain import ChainCosts
from ..cost.plan_cost import CostModel

MAX_STAGES = 24
"""Stages up to which plans get other devices, or one stage more or fewer."""


class Shape(NamedTuple):
    """Stages that are yet to be placed."""

    cuts: Cuts
    replicas: tuple[int, ...]
    classes: tuple[int, ...]
    recompute: tuple[bool, ...]

    def put(
        self, stage: int, cuts: Cuts, replicas: tuple[int, ...], classes: tuple[int, ...],
        recompute: tuple[bool, ...], width: int = 1,
    ) -> Shape:  # fmt: skip
        """Return the shape with other stages in the place of ``width`` from ``stage`` on.

        ``cuts`` are those between the new stages.
        """
        end = stage + width
        return Shape(
            (*self.cuts[: stage + 1], *cuts, *self.cuts[end:]),
            (*self.replicas[:stage], *replicas, *self.replicas[end:]),
            (*self.classes[:stage], *classes, *self.classes[end:]),
            (*self.recompute[:stage], *recompute, *self.recompute[end:]),
        )


def move_cuts(assignment: Assignment, costs: ChainCosts) -> Iterator[Assignment]:
    """Yield assignments with one cut moved to the previous or next position."""
    for place in range(1, len(assignment.cuts) - 1):
        index = costs.index[assignment.cuts[place]]
        for other in (index - 1, index + 1):
            layer = costs.positions[other]
            cuts = (*assignment.cuts[:place], layer, *assignment.cuts[place + 1 :])
            if all(first < last for first, last in pairwise(cuts)):
                yield replace(assignment, cuts=cuts)


def flip_recompute(assignment: Assignment) -> Iterator[Assignment]:
    """Yield assignments of which one stage is recomputed instead of kept, or kept instead."""
    for stage, again in enumerate(assignment.recompute):
        front, rest = assignment.recompute[:stage], assignment.recompute[stage + 1 :]
        yield replace(assignment, recompute=(*front, not again, *rest))


def move_devices(assignment: Assignment, cost_model: CostModel) -> Iterator[Assignment]:
    """Yield assignments with a stage of more or fewer devices, one split, or two merged.

    Of several classes, stages exchange theirs, and idle devices take over a stage or a half of one.
    """
    if assignment.chunks > 1 or assignment.num_stages > MAX_STAGES:
        return
    shape = Shape(assignment.cuts, assignment.replicas, assignment.classes, assignment.recompute)
    devices = cost_model.devices
    for found in dict.fromkeys(_reshape(shape, cost_model)):
        if min(found.replicas) > 0:
            placed = place_stages(
                found.cuts, found.replicas, devices, classes=found.classes,
                recompute=found.recompute,
            )  # fmt: skip
            if placed is not None:
                yield placed


def _reshape(shape: Shape, cost_model: CostModel) -> Iterator[Shape]:
    classes, counts = cost_model.devices.classes, range(len(cost_model.devices.classes))
    for number in counts:
        yield from _change_replicas(shape, number, cost_model)
    for one, other in combinations(range(len(shape.classes)), 2):
        if shape.classes[one] != shape.classes[other]:
            swapped = list(shape.classes)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield shape._replace(classes=tuple(swapped))
    for stage, (number, count) in enumerate(zip(shape.classes, shape.replicas, strict=True)):
        yield from _split(shape, stage, cost_model)
        for idle in counts:
            used = sum(
                each for each, own in zip(shape.replicas, shape.classes, strict=True) if own == idle
            )
            if idle != number and used < len(classes[idle]):
                own = (shape.recompute[stage],)
                yield shape.put(stage, (), (min(count, len(classes[idle]) - used),), (idle,), own)
    for stage in range(len(shape.classes) - 1):
        yield from _merge(shape, stage)


def _change_replicas(shape: Shape, number: int, cost_model: CostModel) -> Iterator[Shape]:
    """Yield one stage of a class with a device, or a group of them, more or less."""
    entry = cost_model.devices.classes[number]
    steps = sorted({1, *(size for size in entry.group_sizes[:-1] if size < len(entry))})
    stages = [stage for stage, own in enumerate(shape.classes) if own == number]
    for step, stage, way in product(steps, stages, (1, -1)):
        count = shape.replicas[stage] + way * step
        replicas = (*shape.replicas[:stage], count, *shape.replicas[stage + 1 :])
        yield shape._replace(replicas=replicas)


def _split(shape: Shape, stage: int, cost_model: CostModel) -> Iterator[Shape]:
    """Yield splits of a stage at the middle of its work, which share or double its replicas.

    One of the halves may go to another class.
    """
    costs, count, number = cost_model.costs, shape.replicas[stage], shape.classes[stage]
    first, last = costs.index[shape.cuts[stage]], costs.index[shape.cuts[stage + 1]]
    if last - first < 2:
        return
    work = costs.forward_s[first] + costs.backward_s[first]
    whole = float(work[last])
    middle = first + 1 + int(np.abs(work[first + 1 : last] - whole / 2).argmin())
    cuts, again = (costs.positions[middle],), (shape.recompute[stage],) * 2
    if count > 1:
        front = round(count * float(work[middle]) / whole) if whole else count // 2
        front = min(max(front, 1), count - 1)
        yield shape.put(stage, cuts, (front, count - front), (number, number), again)
    for other in range(len(cost_model.devices.classes)):
        for pair in dict.fromkeys(((number, other), (other, number))):
            yield shape.put(stage, cuts, (count, count), pair, again)


def _merge(shape: Shape, stage: int) -> Iterator[Shape]:
    """Yield merges of two neighbouring stages on the devices of both, or of one."""
    pair, own = shape.replicas[stage : stage + 2], shape.classes[stage : stage + 2]
    again = (any(shape.recompute[stage : stage + 2]),)
    if own[0] == own[1]:
        yield shape.put(stage, (), (sum(pair),), own[:1], again, width=2)
    for count, number in dict.fromkeys(zip(pair, own, strict=True)):
        yield shape.put(stage, (), (count,), (number,), again, width=2)
