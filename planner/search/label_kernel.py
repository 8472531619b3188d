"""Inner loops of the label search, compiled by numba where it is installed.

`label_setting` states the recurrence. The functions here use only what both numba and plain
Python understand: indexed columns, scalars and NamedTuples. Columns are arrays when compiled and
lists otherwise, because Python indexes lists several times faster than arrays; hence
``column[level][position]`` instead of ``column[level, position]``. Both ways give the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...schedules.numba_jit import float_zeros, int_zeros
from .arcs import MetricCaps, SearchRules, StageArcs
from .device_pool import DevicePool, Floats, Integers
from .device_prices import TOLERANCE
from .label_table import (
    ARC,
    COUNT,
    END,
    FEWEST,
    FRONT,
    IN_FLIGHT,
    KEY,
    LOOKED,
    NEXT_ARC,
    NEXT_LABEL,
    PARENT,
    REPLICAS,
    SIZE,
    STAGES,
    THINNED,
    USED,
    LabelTable,
    grow,
    keep_undominated,
    thin_labels,
)
from .relaxation_kernel import (
    RelaxedArcs,
    all_reduce_s,
    fewest_for_memory,
    fewest_for_metrics,
    held_share,
    level_of,
    next_count,
    occupied,
    place,
    relax_arcs,
    widest_linked,
)


class Labels(NamedTuple):
    """Labels of a search; those at position i are ``begin[i] : finish[i]``.

    Integer columns are stored label by label in ``columns``. ``total`` is the weight and the
    longest exposed summing of gradients. ``reached`` are the fewest replicas with which each arc
    was put in front of a label, within the caps; 0 for none.
    """

    columns: Integers
    weight: Floats
    total: Floats
    begin: Integers
    finish: Integers
    reached: Integers
    num_labels: int
    next_metrics: Floats
    least_weight: float
    complete: bool


class Scope(NamedTuple):
    """Everything but arcs that stays the same during one search.

    Attributes:
        watched: The integer columns in which dominance compares labels.
        residue: Outermost group size of each class but one level, shape (K,).
        prices: Seconds charged per device of each class.
        width: Integer columns of a label.
        last_pin: Largest number from the front that a stage must have; 0 for none.
        tracks_in_flight: See `label_setting`.
        beam: Labels kept at each position at most; 0 for all.
        reached: See `Labels`.
    """

    pool: DevicePool
    rules: SearchRules
    caps: MetricCaps
    watched: Integers
    residue: Integers
    prices: Floats
    width: int
    last_pin: int
    tracks_in_flight: bool
    beam: int
    reached: Integers


class Bound(NamedTuple):
    """Bounds on everything in front of one position; see `RelaxedArcs`."""

    weight: float
    devices: float
    priced: float


class ArcCosts(NamedTuple):
    """One arc as numbers; see `StageArcs`.

    ``buffer`` is arriving plus returning bytes, ``need`` are the replicas of `RelaxedArcs`.
    """

    arc: int
    first: int
    last: int
    device_class: int
    weight: float
    room: int
    divided: int
    whole: int
    saved: int
    buffer: int
    gradients: int
    once: int
    each_round: int
    lead: float
    stage_number: int
    need: int
    is_inner: bool


class LabelBehind(NamedTuple):
    """A label with an arc in front of it.

    Attributes:
        label: Its index.
        row: Where its integer columns start.
        number: Stages of the new label.
        front: Number of the stage from the front; see `FRONT`.
        weight_cap: The new label's total may not exceed.
        free: Devices of the arc's class that the label leaves.
        most: Replicas at most; 0 if the arc cannot be there.
        left: All devices it leaves, in devices of the slowest class.
        worth: Their price.
    """

    label: int
    row: int
    number: int
    front: int
    weight_cap: float
    free: int
    most: int
    left: float
    worth: float


class Extension(NamedTuple):
    """One arc in front of one label, the cut between them on one link level.

    Attributes:
        costs: Of the arc.
        behind: The label behind it.
        class_behind: Class of that label's first stage; -1 at the last position.
        level: Of the cut.
        weight: Of the new label.
        exposed_s: Longest exposed summing of gradients behind.
        need: Replicas at least; -1 if no number will do.
        most: Replicas at most that this level links.
    """

    costs: ArcCosts
    behind: LabelBehind
    class_behind: int
    level: int
    weight: float
    exposed_s: float
    need: int
    most: int


def search_labels(
    arcs: StageArcs, pool: DevicePool, rules: SearchRules, caps: MetricCaps, budget: int,
    tracks_in_flight: bool, last_pin: int, beam: int, tried: Floats,
) -> Labels:  # fmt: skip
    """Keep the undominated labels of every position, from the last position to the first.

    With a beam only so many of each position: those that, with the least that can be in front of
    them, cost least at the relaxation's prices of devices.
    """
    num_atoms = len(arcs.first_arc) - 1
    next_metrics, relaxed = relax_arcs(arcs, pool, rules, caps, tried)
    reached = int_zeros(len(arcs.last))
    scope = make_scope(pool, rules, caps, relaxed.prices, tracks_in_flight, last_pin, beam, reached)
    table = LabelTable(
        int_zeros(scope.width), float_zeros(1), float_zeros(1), float_zeros(1), float_zeros(1)
    )
    counters = int_zeros(6)
    counters[SIZE] = 1  # the base case: nothing used at the last position
    begin, finish = int_zeros(num_atoms + 1), int_zeros(num_atoms + 1)
    finish[num_atoms] = 1
    for i in range(num_atoms - 1, -1, -1):
        begin[i] = counters[SIZE]
        bound = Bound(relaxed.front_weight[i], relaxed.front_devices[i], relaxed.front_priced[i])
        table = extend_to_position(
            i, budget, relaxed, bound, arcs, scope, table, begin, finish, counters
        )
        finish[i] = counters[SIZE]
        if counters[LOOKED] > budget:
            for index in range(relaxed.first_arc[i + 1]):  # not looked at, or not to the end
                reached[relaxed.arc[index]] = relaxed.replicas[index]
            break
    return Labels(
        table.columns, table.weight, table.total, begin, finish, reached, counters[SIZE],
        next_metrics,
        relaxed.least_weight, counters[LOOKED] <= budget and counters[THINNED] == 0,
    )  # fmt: skip


def make_scope(
    pool: DevicePool, rules: SearchRules, caps: MetricCaps, prices: Floats,
    tracks_in_flight: bool, last_pin: int, beam: int, reached: Integers,
) -> Scope:  # fmt: skip
    """Work out what dominance compares, and the residues that keys are made of."""
    num_classes, levels = len(pool.groups), len(pool.groups[0])
    residue = int_zeros(num_classes)
    for k in range(num_classes):
        residue[k] = 1
        for level in range(levels - 1):
            residue[k] = max(residue[k], pool.groups[k][level])
    width = USED + num_classes
    watched, size = int_zeros(width), 0
    for column in range(width):
        if (
            column >= USED
            or (column == IN_FLIGHT and tracks_in_flight)
            or (column == STAGES and rules.max_stages > 0)
            or (column == REPLICAS and rules.count_replicas)
        ):
            watched[size] = column
            size += 1
    return Scope(
        pool, rules, caps, watched[:size], residue, prices, width, last_pin, tracks_in_flight, beam,
        reached,
    )  # fmt: skip


def extend_to_position(
    i: int, budget: int, relaxed: RelaxedArcs, bound: Bound, arcs: StageArcs, scope: Scope,
    table: LabelTable, begin: Integers, finish: Integers, counters: Integers,
) -> LabelTable:  # fmt: skip
    """Make the labels of one position: every arc from it, in front of every label at its end."""
    # Only a longer table is made here. What is called returns numbers only, and so counts no
    # references to arrays (see `numba_jit`), which took half of the time when loops were here.
    feasible, unused = int_zeros(len(arcs.metric_link)), float_zeros(2)
    counters[NEXT_ARC], counters[NEXT_LABEL] = relaxed.first_arc[i], 0
    while extend_arcs(
        i, budget, relaxed, bound, arcs, scope, table, begin, finish, counters, feasible, unused
    ):
        table = grow(table, scope.width)
    return table


def extend_arcs(
    i: int, budget: int, relaxed: RelaxedArcs, bound: Bound, arcs: StageArcs, scope: Scope,
    table: LabelTable, begin: Integers, finish: Integers, counters: Integers, feasible: Integers,
    unused: Floats,
) -> bool:  # fmt: skip
    """Go on with the labels of one position; return True if the table has no room for more."""
    last, first_new = arcs.last, begin[i]
    for index in range(counters[NEXT_ARC], relaxed.first_arc[i + 1]):
        arc = relaxed.arc[index]
        low, high = begin[last[arc]], finish[last[arc]]
        if low == high:
            continue
        if counters[LOOKED] > budget:
            break
        costs = costs_of_arc(arc, i, relaxed.replicas[index], arcs)
        find_feasible(costs, arcs, scope, feasible, unused)
        for label in range(max(low, counters[NEXT_LABEL]), high):
            behind = look_behind(costs, label, bound, scope, table)
            if behind.most < costs.need:
                continue
            looked = counters[LOOKED]
            for level in range(len(feasible)):
                step = extend_over_level(costs, behind, level, feasible, bound, arcs, scope, table)
                count, counters[FEWEST] = step.need, 2**60
                while count > 0:
                    # one count makes a label for each level at most
                    if counters[SIZE] + len(feasible) > len(table.weight):
                        # The pair begins anew: labels that it has made already are dominated by
                        # equal ones, or by those that removed them.
                        counters[NEXT_ARC], counters[NEXT_LABEL] = index, label
                        counters[LOOKED] = looked
                        return True
                    count = try_count(step, count, bound, scope, table, first_new, counters)
            if scope.beam > 0 and counters[SIZE] - first_new > 2 * scope.beam:
                counters[SIZE] = thin(first_new, scope, table, counters)
        counters[NEXT_LABEL] = 0
    if scope.beam > 0:
        counters[SIZE] = thin(first_new, scope, table, counters)
    return False


def thin(begin: int, scope: Scope, table: LabelTable, counters: Integers) -> int:
    """Keep as many labels of a position as the beam is wide; return the new size."""
    size = thin_labels(table, scope.prices, begin, counters[SIZE], scope.width, scope.beam)
    counters[THINNED] += counters[SIZE] - size
    return size


def costs_of_arc(arc: int, i: int, need: int, arcs: StageArcs) -> ArcCosts:
    """Read one arc from position i as numbers."""
    j = arcs.last[arc]
    return ArcCosts(
        arc, i, j, arcs.device_class[arc], arcs.weight[arc], arcs.room[arc], arcs.divided[arc],
        arcs.whole[arc], arcs.saved[arc], arcs.arriving[i] + arcs.returning[j],
        arcs.gradients[arc], arcs.once[arc], arcs.each_round[arc], arcs.lead[i],
        arcs.stage_number[arc], need, j < len(arcs.first_arc) - 1,
    )  # fmt: skip


def find_feasible(
    costs: ArcCosts, arcs: StageArcs, scope: Scope, feasible: Integers, unused: Floats
) -> None:
    """Write the fewest replicas within the metric caps for each level of the cut; -1 for none.

    Values beyond the caps go to ``unused``: `relax_arcs` has noted them already.
    """
    first_unit, second_unit = arcs.first_unit[costs.arc], arcs.second_unit[costs.arc]
    for level in range(len(feasible)):
        if level > 0 and not costs.is_inner:
            feasible[level] = -1
            continue
        need = fewest_for_metrics(
            first_unit + arcs.metric_link[level][costs.last], second_unit,
            arcs.offset[costs.first], scope.rules, scope.caps, unused,
        )  # fmt: skip
        if need >= 0:
            need = max(need, scope.rules.min_replicas)
        if costs.is_inner and need > widest_linked(scope.pool.groups, level):
            need = -1
        feasible[level] = need


def look_behind(
    costs: ArcCosts, label: int, bound: Bound, scope: Scope, table: LabelTable
) -> LabelBehind:
    """Read what an arc in front of a label may have; no replicas if it cannot be there."""
    rules, caps, columns, k = scope.rules, scope.caps, table.columns, costs.device_class
    row, is_first = label * scope.width, costs.first == 0
    number = columns[row + STAGES] + 1
    # a label may be heavier than the one it stands for, by a quantum per stage
    cap = caps.weight + (caps.quantum * number if caps.quantum > 0 else 0.0)
    front = number_from_front(is_first, costs.stage_number, columns[row + FRONT])
    if (
        front < 0
        or not allows_stages(is_first, number, rules)
        or table.total[label] + costs.weight + bound.weight > cap
    ):
        return LabelBehind(label, row, number, front, cap, 0, 0, 0.0, 0.0)
    free = scope.pool.total[k] - columns[row + USED + k]
    most = min(
        free, rules.max_replicas, rules.num_microbatches,
        rules.max_total_replicas - columns[row + REPLICAS],
    )  # fmt: skip
    left = value_left(columns, row + USED, scope.pool.total, scope.pool.speed)
    value = value_left(columns, row + USED, scope.pool.total, scope.prices)
    if is_hopeless(
        table.total[label] + costs.weight, left - costs.need * scope.pool.speed[k],
        value - costs.need * scope.prices[k], cap, bound,
    ):  # fmt: skip
        most = 0
    return LabelBehind(label, row, number, front, cap, free, most, left, value)


def extend_over_level(
    costs: ArcCosts, behind: LabelBehind, level: int, feasible: Integers, bound: Bound,
    arcs: StageArcs, scope: Scope, table: LabelTable,
) -> Extension:  # fmt: skip
    """Put an arc in front of a label, the cut on one level; needs -1 replicas if it cannot be."""
    columns, row, need, most = table.columns, behind.row, feasible[level], behind.most
    weight, class_behind = 0.0, -1
    exposed_s = table.total[behind.label] - table.weight[behind.label]
    if need > most:
        need = -1
    if need >= 0:
        weight = table.weight[behind.label] + (costs.weight + arcs.weight_link[level][costs.last])
        left = behind.left - need * scope.pool.speed[costs.device_class]
        value = behind.worth - need * scope.prices[costs.device_class]
        if is_hopeless(weight + exposed_s, left, value, behind.weight_cap, bound):
            need = -1
        else:
            need = fewest_for_memory(
                need, most, columns[row + IN_FLIGHT], costs.room, costs.divided, costs.whole,
                costs.saved, costs.buffer, scope.rules,
            )  # fmt: skip
    if costs.is_inner:
        class_behind = arcs.device_class[columns[row + ARC]]
        most = min(most, widest_linked(scope.pool.groups, level))
        need = occupied(need, scope.pool.granule)
    need = need if need <= most else -1
    return Extension(costs, behind, class_behind, level, weight, exposed_s, need, most)


def number_from_front(is_first: bool, pinned: int, behind: int) -> int:
    """Return the number from the front of a stage, 0 if it is free; -1 if it may not be here.

    A pinned number, or one behind, is 0 where the stage is free.
    """
    front = pinned
    if behind > 0:
        front = behind - 1
        if front < 1 or (pinned > 0 and pinned != front):
            return -1
    if front > 0 and is_first != (front == 1):
        return -1
    return front


def allows_stages(is_first: bool, number: int, rules: SearchRules) -> bool:
    """Return True if a path may have that many stages from this one to the end."""
    if rules.num_stages > 0 and (
        number > rules.num_stages or is_first != (number == rules.num_stages)
    ):
        return False
    return rules.max_stages == 0 or number <= rules.max_stages - (0 if is_first else 1)


def value_left(columns: Integers, at: int, total: Integers, prices: Floats) -> float:
    """Return the price of the devices that a label leaves."""
    left = 0.0
    for k in range(len(prices)):
        left += (total[k] - columns[at + k]) * prices[k]
    return left


def is_hopeless(total: float, left: float, value: float, cap: float, bound: Bound) -> bool:
    """Return True if no path through a label keeps the total's cap and has devices enough.

    ``left`` are the devices it leaves, in devices of the slowest class, ``value`` their price.
    """
    if total + bound.weight > cap or bound.devices > left * (1 + TOLERANCE) + TOLERANCE:
        return True
    return total + bound.priced > cap + value + TOLERANCE * (cap + value)


def try_count(
    step: Extension, count: int, bound: Bound, scope: Scope, table: LabelTable, begin: int,
    counters: Integers,
) -> int:  # fmt: skip
    """Place that many replicas; return the next number that may lead to other labels, or -1."""
    pool, k, row, free = scope.pool, step.costs.device_class, step.behind.row, step.behind.free
    groups, is_inner, between = pool.groups[k], step.class_behind >= 0, pool.between[k]
    is_last = table.columns[row + USED + k] == 0
    behind = table.columns[row + IN_FLIGHT]
    in_flight = count * (1 + (behind + count - 1) // count)
    left = step.behind.left - count * pool.speed[k]
    value = step.behind.worth - count * scope.prices[k]
    if is_hopeless(step.weight + step.exposed_s, left, value, step.behind.weight_cap, bound):
        return -1  # and so are more
    previous = -1
    for pad in range(len(groups)):
        counters[LOOKED] += 1 + len(pool.total) // 4
        # behind every border of a group: there the cut is on another level
        size = 1 if pad == 0 else groups[pad - 1]
        end = place(groups, is_last, free // size * size, count)
        is_new = end >= 0 and end != previous
        previous = end
        if not is_new or (is_inner and cut_level(step, end, groups, between) != step.level):
            continue
        if count >= pool.regular_from:
            counters[FEWEST] = min(counters[FEWEST], in_flight)
        add_label(step, count, end, in_flight, bound, scope, table, begin, counters)
    following = next_count(
        groups, pool.total[k], is_last, count, behind, counters[FEWEST], pool.regular_from
    )
    return following if following <= step.most else -1


def cut_level(step: Extension, end: int, groups: Integers, between: Integers) -> int:
    """Return the link level between devices that end at ``end`` and the stage behind them."""
    if step.class_behind == step.costs.device_class:
        return level_of(groups, end - 1, step.behind.free)
    return int(between[step.class_behind])


def add_label(
    step: Extension, count: int, end: int, in_flight: int, bound: Bound, scope: Scope,
    table: LabelTable, begin: int, counters: Integers,
) -> None:  # fmt: skip
    """Make the label of a placed stage, unless a bound rules it out."""
    pool, k, quantum, num_classes = (
        scope.pool, step.costs.device_class, scope.caps.quantum, len(scope.pool.total),
    )  # fmt: skip
    total = step.weight + step.exposed_s
    if count > 1:
        groups = pool.groups[k]
        level = level_of(groups, end - count, end - 1)
        size = step.costs.gradients
        if held_share(count, step.costs.divided, step.costs.whole) < step.costs.divided:
            rounds = (scope.rules.num_microbatches + count - 1) // count
            size = step.costs.once + rounds * step.costs.each_round
        sync_s = all_reduce_s(size, count, level, pool.protocols, pool.bandwidth, groups)
        total = max(total, step.weight + (sync_s * scope.rules.sync_scale - step.costs.lead))
    new = counters[SIZE]
    # written behind the last label kept; `keep_undominated` moves it to its place
    columns, row = table.columns, new * scope.width
    for other in range(num_classes):
        columns[row + USED + other] = columns[step.behind.row + USED + other]
    columns[row + USED + k] = pool.total[k] - (end - count)
    left = value_left(columns, row + USED, pool.total, pool.speed)
    value = value_left(columns, row + USED, pool.total, scope.prices)
    if is_hopeless(total, left, value, step.behind.weight_cap, bound):
        return
    arc = step.costs.arc
    if scope.reached[arc] == 0 or count < scope.reached[arc]:
        scope.reached[arc] = count
    columns[row + IN_FLIGHT] = in_flight if scope.tracks_in_flight else 0
    columns[row + STAGES], columns[row + FRONT] = step.behind.number, step.behind.front
    columns[row + REPLICAS] = columns[step.behind.row + REPLICAS] + count
    columns[row + KEY] = key_of(step, k, columns, row + USED, scope)
    columns[row + PARENT], columns[row + ARC] = step.behind.label, arc
    columns[row + COUNT], columns[row + END] = count, end
    table.weight[new], table.total[new] = step.weight, total
    table.bucket[new] = bucket_of(step.weight, quantum)
    table.total_bucket[new] = bucket_of(total, quantum)
    # comparing with 64 / columns labels takes about as long as making one
    counters[LOOKED] += (new - begin) * (num_classes + 3) // 64
    counters[SIZE] = keep_undominated(table, begin, new, scope.width, scope.watched)


def bucket_of(value: float, quantum: float) -> float:
    """Return a weight or total as it is compared: rounded down to whole quanta."""
    if quantum == 0:
        return value
    return 0.0 if quantum == math.inf else float(math.floor(value / quantum))


def key_of(step: Extension, k: int, columns: Integers, used: int, scope: Scope) -> int:
    """Return the number of the label's kind; labels of different kinds are not compared."""
    key = 0
    for other in range(len(scope.residue)):
        left = scope.pool.total[other] - columns[used + other]
        key = key * scope.residue[other] + left % scope.residue[other]
    if len(scope.pool.total) > 1 and len(scope.pool.groups[0]) > 1:
        key = key * len(scope.pool.total) + k
    if scope.rules.num_stages > 0:
        key = key * (scope.rules.num_stages + 1) + step.behind.number
    if scope.last_pin > 0:
        key = key * (scope.last_pin + 1) + step.behind.front
    return key
