"""The labels of a search as growing columns: dominance, the width of a beam, room for more.

What `label_kernel` says of its functions holds for these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...schedules.numba_jit import float_zeros, int_zeros
from .device_pool import Floats, Integers

IN_FLIGHT, STAGES, REPLICAS, KEY, PARENT, ARC, COUNT, END, FRONT, USED = range(10)
"""Integer columns of a label; from ``USED`` on one column for each device class.

``REPLICAS`` are those of all its stages and ``COUNT`` those of its first stage, whose devices end
at ``END`` of their class. ``FRONT`` is the number from the front of a stage at or behind a pinned
one, else 0.
"""

LOOKED, SIZE, FEWEST, THINNED, NEXT_ARC, NEXT_LABEL = range(6)
"""Counters of a search: candidates looked at, labels kept, the fewest micro-batches in flight of
the numbers of replicas placed so far in front of one label, labels that a beam left out, and the
arc and label to go on with once the table is longer."""

COST_STEPS = 50
"""Halvings of the range of costs until the cheapest labels are told from the others."""


class LabelTable(NamedTuple):
    """The growing part of `label_kernel.Labels`: its columns, and numbers with a decimal point.

    ``bucket`` and ``total_bucket`` are weight and total as compared: rounded down to whole quanta.
    """

    columns: Integers
    weight: Floats
    total: Floats
    bucket: Floats
    total_bucket: Floats


def keep_undominated(table: LabelTable, begin: int, new: int, width: int, watched: Integers) -> int:
    """Compare the label at ``new`` with those from ``begin`` on; return the new size.

    It goes if one is at least as good in every watched column, and those it is at least as good
    as go; the others keep their order, on which ties between plans depend.
    """
    columns, bucket, total_bucket = table.columns, table.bucket, table.total_bucket
    row, target = new * width, begin
    for other in range(begin, new):
        at = other * width
        if columns[at + KEY] == columns[row + KEY]:
            worse = bucket[other] <= bucket[new] and total_bucket[other] <= total_bucket[new]
            better = bucket[other] >= bucket[new] and total_bucket[other] >= total_bucket[new]
            for index in range(len(watched)):
                one, two = columns[at + watched[index]], columns[row + watched[index]]
                if one > two:
                    worse = False
                elif one < two:
                    better = False
                if not worse and not better:
                    break
            if worse and better:  # equal: the smaller total stays
                better = table.total[other] > table.total[new]
                worse = not better
            if worse:
                return new
            if better:
                continue
        if target != other:
            move_label(table, other, target, width)
        target += 1
    if target != new:
        move_label(table, new, target, width)
    return target + 1


def thin_labels(
    table: LabelTable, prices: Floats, begin: int, size: int, width: int, most: int
) -> int:
    """Keep that many of the labels from ``begin`` on, the cheapest; return the new size.

    A label costs its total and the price of the devices it uses: what comes in front of it costs
    the least of these at best, which is the same for all labels of a position.
    """
    if size - begin <= most:
        return size
    low, high = math.inf, -math.inf
    for label in range(begin, size):
        cost = cost_of_label(table, prices, label, width)
        low, high = min(low, cost), max(high, cost)
    # At most that many labels cost up to `low`, more than that up to `high`.
    low, within = low - 1.0, 0
    for _ in range(COST_STEPS):
        middle, count = low + (high - low) / 2, 0
        for label in range(begin, size):
            if cost_of_label(table, prices, label, width) <= middle:
                count += 1
        if count <= most:
            low, within = middle, count
        else:
            high = middle
    spare, target = most - within, begin
    for label in range(begin, size):
        cost = cost_of_label(table, prices, label, width)
        if cost > low:  # of equal ones between the two, the first
            if cost > high or spare == 0:
                continue
            spare -= 1
        if target != label:
            move_label(table, label, target, width)
        target += 1
    return target


def cost_of_label(table: LabelTable, prices: Floats, label: int, width: int) -> float:
    """Return the total of a label and the price of the devices it uses."""
    at = label * width + USED
    cost: float = table.total[label]
    for k in range(len(prices)):
        cost += table.columns[at + k] * prices[k]
    return cost


def move_label(table: LabelTable, source: int, target: int, width: int) -> None:
    """Copy one label over another."""
    columns = table.columns
    for column in range(width):
        columns[target * width + column] = columns[source * width + column]
    table.weight[target], table.total[target] = table.weight[source], table.total[source]
    table.bucket[target] = table.bucket[source]
    table.total_bucket[target] = table.total_bucket[source]


def grow(table: LabelTable, width: int) -> LabelTable:
    """Return the labels with room for twice as many, at least 1024."""
    size = len(table.weight)
    capacity = max(2 * size, 1024)
    grown = LabelTable(
        int_zeros(capacity * width), float_zeros(capacity), float_zeros(capacity),
        float_zeros(capacity), float_zeros(capacity),
    )  # fmt: skip
    for index in range(size * width):
        grown.columns[index] = table.columns[index]
    for label in range(size):
        grown.weight[label], grown.total[label] = table.weight[label], table.total[label]
        grown.bucket[label] = table.bucket[label]
        grown.total_bucket[label] = table.total_bucket[label]
    return grown
