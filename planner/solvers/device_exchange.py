"""Variations of a plan on several kinds of devices: other kinds for its stages, idle ones used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from ..cost.assignment import Assignment, Cuts
from ..cost.plan_cost import CostModel
from .cut_fitting import RECOMPUTE_CHOICES, fit_cuts

MAX_STAGES = 24
"""Stages up to which those of two classes are exchanged in pairs."""


def exchange_devices(assignment: Assignment, cost_model: CostModel) -> Iterator[Assignment]:
    """Yield assignments with the classes of two stages exchanged, or with an idle device used.

    The cuts are kept, and fitted to the devices' speed and memory. Only for plans without replicas.
    """
    classes = assignment.classes
    if max(assignment.replicas) > 1 or assignment.chunks > 1 or len(classes) > MAX_STAGES:
        return
    if len(cost_model.devices.classes) == 1:
        return
    found = [
        (assignment.cuts, _exchanged(classes, one, other))
        for one, other in combinations(range(len(classes)), 2)
        if classes[one] != classes[other]
    ]
    for number, entry in enumerate(cost_model.devices.classes):
        if classes.count(number) == len(entry):
            continue
        for stage in range(len(classes)):
            moved = (*classes[:stage], number, *classes[stage + 1 :])
            found.append((assignment.cuts, moved))
            found += _with_one_more(assignment, cost_model, stage, number)
    for cuts, other_classes in found:
        made = _place(cuts, other_classes, assignment)
        yield made
        for choices in RECOMPUTE_CHOICES[cost_model.options.recompute]:
            fitted = fit_cuts(cost_model, made, choices)
            if fitted is not None:
                yield fitted


def _exchanged(classes: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    changed = list(classes)
    changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


def _with_one_more(
    assignment: Assignment, cost_model: CostModel, stage: int, number: int
) -> Iterator[tuple[Cuts, tuple[int, ...]]]:
    """Yield the stage split in the middle, its first or its second half on the new device."""
    costs, cuts, classes = cost_model.costs, assignment.cuts, assignment.classes
    first, last = costs.index[cuts[stage]], costs.index[cuts[stage + 1]]
    if last - first < 2:
        return
    middle = costs.positions[(first + last) // 2]
    split = (*cuts[: stage + 1], middle, *cuts[stage + 1 :])
    yield split, (*classes[:stage], number, *classes[stage:])
    yield split, (*classes[: stage + 1], number, *classes[stage + 1 :])


def _place(cuts: Cuts, classes: tuple[int, ...], like: Assignment) -> Assignment:
    """Put every stage on the next device of its class."""
    used: dict[int, int] = {}
    ends = []
    for number in classes:
        used[number] = used.get(number, 0) + 1
        ends.append(used[number])
    # A stage that was split is recomputed like its neighbour; fitting decides anew.
    recompute = (*like.recompute, *like.recompute[-1:])[: len(classes)]
    return replace(
        like, cuts=cuts, replicas=(1,) * len(classes), classes=classes, ends=tuple(ends),
        recompute=recompute, extra_depths=(),
    )  # fmt: skip
