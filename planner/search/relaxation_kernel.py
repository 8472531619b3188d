"""Fewest replicas of an arc, and the relaxation that looks at every arc apart from the others.

What `label_kernel` says of its functions holds for these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...core.plan.schedule import POSTED_AHEAD
from ...schedules.numba_jit import float_zeros, int_zeros
from .arcs import DEPTH_ALL, DEPTH_PIPELINE, MetricCaps, SearchRules, StageArcs
from .device_pool import DevicePool, Floats, Integers, time_protocols
from .device_prices import (
    TOLERANCE,
    UsableArcs,
    charge,
    price_classes,
    price_speed,
    shortest_from_front,
    shortest_to_end,
    worth,
)

FIRST, SECOND = 0, 1
"""Indices of the metrics in ``next_metrics``."""

FAR = 2**40
"""More replicas than any cluster has: nothing can be behind this position."""


class RelaxedArcs(NamedTuple):
    """Arcs that a path within the caps can have, and bounds on what is in front of a position.

    Attributes:
        first_arc: The remaining arcs from position i are ``first_arc[i] : first_arc[i + 1]``.
        arc: Index in `StageArcs` of each remaining arc.
        replicas: Replicas it needs at least.
        front_weight: Least weight of a path from position 0, by position.
        front_devices: Fewest devices of one, in devices of the slowest class.
        front_priced: Least weight plus prices of devices of one.
        prices: Seconds charged per device of each class; 0 where devices are ample.
        least_weight: A lower bound of every path's weight.
    """

    first_arc: Integers
    arc: Integers
    replicas: Integers
    front_weight: Floats
    front_devices: Floats
    front_priced: Floats
    prices: Floats
    least_weight: float


# --- Devices and replicas ---------------------------------------------------------------------


def place(groups: Integers, is_last: bool, end: int, replicas: int) -> int:
    """Compute `DeviceClass.place`; -1 if the replicas fit nowhere in front of ``end``."""
    settled = False
    while not settled:  # moving down for one level can break a smaller one's alignment
        settled = True
        for level in range(len(groups) - 1):
            size = groups[level]
            if replicas <= size:
                if (end - 1) // size != (end - replicas) // size:
                    end = end // size * size
                    settled = False
                break
            if is_last:
                if (end - replicas) % size != 0:
                    end -= (end - replicas) % size
                    settled = False
                continue
            if end % size != 0:
                end = end // size * size
                settled = False
            if replicas % size != 0:
                return -1
        if end < replicas:
            return -1
    return end


def level_of(groups: Integers, first: int, last: int) -> int:
    """Return the innermost level whose group holds both device indices."""
    for level in range(len(groups)):
        if first // groups[level] == last // groups[level]:
            return level
    return len(groups) - 1


def next_count(
    groups: Integers, total: int, is_last: bool, count: int, in_flight: int, fewest: int,
    regular_from: int,
) -> int:  # fmt: skip
    """Return the next number of replicas to try after ``count``; -1 if none.

    Up to ``regular_from``, every number that fits: more replicas may sum their gradients faster.
    Then, below a whole group of the outermost level but one, every number that fits a level; for
    the last stage of a class, which may have a part of its last group, every number from which on
    it begins further in front. In all other cases only those that leave fewer than ``fewest``
    micro-batches in flight, the best of those placed from ``regular_from`` on.
    """
    inner, border = 1, -1
    for level in range(len(groups) - 1):
        size = groups[level]
        if count < size:
            border = (count // inner + 1) * inner
            break
        inner = max(inner, size)
    if not is_last:
        if border > 0:
            return border
    elif border > 0:
        border = min(count + 1 + (-count) % inner, count + 1 + (total - count) % inner)
    step = 1 if is_last else inner
    low = count + 1
    if count < regular_from:
        return (low + step - 1) // step * step
    while True:
        following = (low + step - 1) // step * step
        if 0 < border <= following or following + in_flight >= fewest:
            return border
        turns = (in_flight + following - 1) // following
        if following * (1 + turns) < fewest:
            return following
        if turns <= 1:
            return border
        # as many turns with more replicas leave more in flight: go on to one turn fewer
        low = max(following + 1, (in_flight + turns - 2) // (turns - 1))


def all_reduce_s(
    size: int, replicas: int, level: int, protocols: Floats, bandwidth: Floats, groups: Integers
) -> float:
    """Compute `Cluster.all_reduce_time_s`: a ring at each level, on ever smaller shards."""
    time_s, most = 0.0, len(bandwidth[0]) - 1
    inner = 1
    for index in range(level + 1):
        members = replicas
        if index != level:
            members = max(1, min(replicas, groups[index] // inner))
        if members >= 2 and size > 0:
            small_s, large_s = time_protocols(
                protocols, index, 2 * (members - 1), size / members,
                bandwidth[index][min(members, most)],
            )  # fmt: skip
            time_s += min(small_s, large_s)
        size = (size + members - 1) // members
        replicas = (replicas + members - 1) // members
        inner = max(inner, groups[index])
    return time_s


def least_sync_s(size: int, replicas: int, pool: DevicePool, groups: Integers) -> float:
    """Bound the time to sum gradients over that many replicas, or more, from below.

    They meet in the smallest group that holds them all. Where groups of an outer level are
    smaller, as those of a class with few devices in each can be, nothing is known: 0.
    """
    level = 0
    while level < len(groups) - 1 and groups[level] < replicas:
        if groups[level + 1] < groups[level]:
            return 0.0
        level += 1
    return all_reduce_s(size, replicas, level, pool.protocols, pool.least_bandwidth, groups)


def occupied(replicas: int, granule: int) -> int:
    """Return the devices that many replicas occupy; see `DevicePool.granule`."""
    if granule > 0 and replicas > granule:
        return (replicas + granule - 1) // granule * granule
    return replicas


def widest_linked(groups: Integers, level: int) -> int:
    """Return the most replicas that are ever linked at a level to the stage behind.

    More than a group's size are whole groups, and what follows is in another group. Devices of
    another class may share one, so nothing is known of several classes.
    """
    if len(groups) > 1 or level >= len(groups[0]) - 1:
        return FAR
    widest = groups[0][0]
    for inner in range(1, level + 1):
        widest = max(widest, groups[0][inner])
    return int(widest)


def fewest_for_metric(
    unit: float, cap: float, offset: float, rules: SearchRules, next_metrics: Floats, metric: int
) -> int:
    """Return the fewest replicas that keep a metric within its cap; -1 if none do.

    The least value above the cap that fewer replicas would have goes to ``next_metrics``.
    """
    m, spared = rules.num_microbatches, rules.spared
    if cap == math.inf:
        return 1
    if rules.per_replica:
        if unit <= cap:
            return 1
        if cap <= 0 or unit / cap > FAR:
            next_metrics[metric] = min(next_metrics[metric], unit / m)
            return -1
        count = math.ceil(unit / cap)
        # the quotient is rounded: step to the count that the comparison itself agrees with
        while unit / count > cap:
            count += 1
        while count > 1 and unit / (count - 1) <= cap:
            count -= 1
        next_metrics[metric] = min(next_metrics[metric], unit / (count - 1))
        return count
    if offset + (m - spared) * unit <= cap:
        return 1
    if unit <= 0 or cap < offset:
        next_metrics[metric] = min(next_metrics[metric], offset + (1 - spared) * unit)
        return -1
    # most micro-batches per replica within the cap, rounding mended as above
    most = int(min((cap - offset) / unit, float(m))) + spared
    most = max(min(most, m - 1), 0)
    while most < m and offset + (most + 1 - spared) * unit <= cap:
        most += 1
    while most > 0 and offset + (most - spared) * unit > cap:
        most -= 1
    next_metrics[metric] = min(next_metrics[metric], offset + (most + 1 - spared) * unit)
    if most < 1:
        return -1
    return (m + most - 1) // most


def fewest_for_metrics(
    unit: float, second: float, offset: float, rules: SearchRules, caps: MetricCaps,
    next_metrics: Floats,
) -> int:  # fmt: skip
    """Return the fewest replicas that keep both metrics of a stage within their caps, or -1."""
    count = fewest_for_metric(unit, caps.first, offset, rules, next_metrics, FIRST)
    if second > 0:
        other = fewest_for_metric(second, caps.second, 0.0, rules, next_metrics, SECOND)
        count = -1 if min(count, other) < 0 else max(count, other)
    return count


def fits_memory(
    replicas: int, behind: int, room: int, saved: int, buffer: int, rules: SearchRules
) -> bool:
    """Return True if a stage of that many replicas fits its devices; see `default_depths`."""
    share = (rules.num_microbatches + replicas - 1) // replicas
    depth, posted = 1, POSTED_AHEAD
    if rules.depth == DEPTH_PIPELINE:
        depth = min(share, 1 + (behind + replicas - 1) // replicas)
    elif rules.depth == DEPTH_ALL:
        depth = share
    else:
        posted = 1
    return room - min(share, posted) * buffer - depth * saved >= 0


def held_share(replicas: int, divided: int, whole: int) -> int:
    """Return the bytes that a replica holds of the shared ones.

    Where sharing would hold more than whole copies, replicas do not share.
    """
    return min(divided, (divided + replicas - 1) // replicas + whole)


def fewest_for_memory(
    need: int, most: int, behind: int, room: int, divided: int, whole: int, saved: int,
    buffer: int, rules: SearchRules,
) -> int:  # fmt: skip
    """Return the fewest replicas from ``need`` to ``most`` that fit the memory; -1 if none do.

    More replicas never need more memory each, so the search may double and halve.
    """
    if need > most:
        return -1
    left = room - held_share(need, divided, whole)
    if fits_memory(need, behind, left, saved, buffer, rules):
        return need
    left = room - held_share(most, divided, whole)
    if not fits_memory(most, behind, left, saved, buffer, rules):
        return -1
    low, step = need, 1
    high = min(low + step, most)
    while not fits_memory(
        high, behind, room - held_share(high, divided, whole), saved, buffer, rules
    ):
        low, step = high, 2 * step
        high = min(low + step, most)
    while high - low > 1:
        middle = (low + high) // 2
        left = room - held_share(middle, divided, whole)
        if fits_memory(middle, behind, left, saved, buffer, rules):
            high = middle
        else:
            low = middle
    return high


# --- Relaxation: every arc apart from the others ----------------------------------------------


def relax_arcs(
    arcs: StageArcs, pool: DevicePool, rules: SearchRules, caps: MetricCaps, tried: Floats
) -> tuple[Floats, RelaxedArcs]:
    """Drop the arcs that no path within the caps can have, and bound the rest.

    Replicas of every arc are the fewest by its own metrics and memory, given the fewest that can be
    behind it. Then the shortest paths through it by weight, by devices, and by both at prices of
    devices (`device_prices`), sought near those ``tried`` before, say whether it can be part of a
    path. Returns the least values of both metrics beyond their caps, and what remains.
    """
    num_atoms = len(arcs.first_arc) - 1
    next_metrics = float_zeros(2)
    for metric in range(2):
        next_metrics[metric] = math.inf
    usable = usable_arcs(arcs, pool, rules, caps, next_metrics)
    free = float_zeros(len(pool.total))
    slack = worth(pool.speed, pool.total) * (1 + TOLERANCE) + TOLERANCE
    weights, devices = charge(usable, 1.0, free), charge(usable, 0.0, pool.speed)
    back_weight, back_devices = shortest_to_end(usable, weights), shortest_to_end(usable, devices)
    if not back_devices[0] <= slack:  # no path, or none with so few devices
        none, zeros = int_zeros(0), float_zeros(num_atoms + 1)
        return next_metrics, RelaxedArcs(
            int_zeros(num_atoms + 1), none, none, zeros, zeros, zeros, free, math.inf
        )
    front_weight = shortest_from_front(usable, weights)
    front_devices = shortest_from_front(usable, devices)
    prices, least_weight = price_speed(usable, pool, back_weight, back_devices)
    if len(free) > 1:
        prices, bound = price_classes(usable, pool, caps.weight, prices, tried)
        least_weight = max(least_weight, bound)
    priced, front_priced, back_priced = weights, front_weight, back_weight
    if worth(prices, pool.total) > 0:
        priced = charge(usable, 1.0, prices)
        front_priced = shortest_from_front(usable, priced)
        back_priced = shortest_to_end(usable, priced)
    limit = (caps.weight + worth(prices, pool.total)) * (1 + TOLERANCE)
    first_arc = int_zeros(num_atoms + 1)
    kept, replicas = int_zeros(len(usable.arc)), int_zeros(len(usable.arc))
    size, last = 0, usable.last
    for i in range(num_atoms):
        first_arc[i] = size
        for index in range(usable.first_arc[i], usable.first_arc[i + 1]):
            j, exposed_s = last[index], usable.exposed[index]
            if (
                front_devices[i] + devices[index] + back_devices[j] <= slack
                and front_weight[i] + weights[index] + exposed_s + back_weight[j] <= caps.weight
                and front_priced[i] + priced[index] + exposed_s + back_priced[j] <= limit
            ):
                kept[size], replicas[size] = usable.arc[index], usable.replicas[index]
                size += 1
    first_arc[num_atoms] = size
    return next_metrics, RelaxedArcs(
        first_arc, kept[:size], replicas[:size], front_weight, front_devices, front_priced, prices,
        least_weight,
    )  # fmt: skip


def usable_arcs(
    arcs: StageArcs, pool: DevicePool, rules: SearchRules, caps: MetricCaps, next_metrics: Floats
) -> UsableArcs:
    """Give every arc the fewest replicas it can have, and leave out those that can have none."""
    num_atoms, num_arcs = len(arcs.first_arc) - 1, len(arcs.last)
    needed, link, exposed = int_zeros(num_arcs), float_zeros(num_arcs), float_zeros(num_arcs)
    # fewest replicas of any path from each position to the end
    behind = int_zeros(num_atoms + 1)
    for i in range(num_atoms - 1, -1, -1):
        behind[i] = relax_position(
            i, arcs, pool, rules, caps, behind, needed, link, exposed, next_metrics
        )
    usable = UsableArcs(
        int_zeros(num_atoms + 1), int_zeros(num_arcs), int_zeros(num_arcs), int_zeros(num_arcs),
        int_zeros(num_arcs), float_zeros(num_arcs), int_zeros(num_arcs), float_zeros(num_arcs),
    )  # fmt: skip
    size = gather_usable(arcs, pool, needed, link, exposed, usable)
    return UsableArcs(
        usable.first_arc, usable.last[:size], usable.arc[:size], usable.replicas[:size],
        usable.device_class[:size], usable.weight[:size], usable.devices[:size],
        usable.exposed[:size],
    )  # fmt: skip


def gather_usable(
    arcs: StageArcs, pool: DevicePool, needed: Integers, link: Floats, exposed: Floats,
    usable: UsableArcs,
) -> int:  # fmt: skip
    """Fill in the arcs that need a positive number of replicas; return how many they are."""
    size = 0
    for i in range(len(arcs.first_arc) - 1):
        usable.first_arc[i] = size
        for arc in range(arcs.first_arc[i], arcs.first_arc[i + 1]):
            if needed[arc] > 0:
                usable.last[size], usable.arc[size] = arcs.last[arc], arc
                usable.replicas[size] = needed[arc]
                usable.weight[size] = arcs.weight[arc] + link[arc]
                usable.device_class[size] = arcs.device_class[arc]
                usable.devices[size] = occupied(needed[arc], pool.granule)
                usable.exposed[size] = exposed[arc]
                size += 1
    usable.first_arc[len(arcs.first_arc) - 1] = size
    return size


def relax_position(
    i: int, arcs: StageArcs, pool: DevicePool, rules: SearchRules, caps: MetricCaps,
    behind: Integers, needed: Integers, link: Floats, exposed: Floats, next_metrics: Floats,
) -> int:  # fmt: skip
    """Find the fewest replicas of each arc from a position; return the fewest of a whole path.

    Writes replicas (0 for none) to ``needed``, the least weight of the cut to ``link``, and the
    least time for which the summing of gradients is exposed to ``exposed``.
    """
    fewest, offset, lead, is_inner = FAR, arcs.offset[i], arcs.lead[i], True
    for arc in range(arcs.first_arc[i], arcs.first_arc[i + 1]):
        room, j, k = arcs.room[arc], arcs.last[arc], arcs.device_class[arc]
        if room < 0:
            continue
        is_inner = j < len(arcs.first_arc) - 1
        need, link[arc] = fewest_over_levels(
            arcs.first_unit[arc], arcs.second_unit[arc], offset, j, is_inner, arcs.metric_link,
            arcs.weight_link, pool.groups, rules, caps, next_metrics,
        )  # fmt: skip
        if need < 0 or behind[j] >= FAR:
            continue
        need = fewest_for_memory(
            max(need, arcs.min_replicas[arc]),
            min(pool.total[k], rules.max_replicas, rules.num_microbatches),
            behind[j], room, arcs.divided[arc], arcs.whole[arc], arcs.saved[arc],
            arcs.arriving[i] + arcs.returning[j], rules,
        )  # fmt: skip
        if need < 0:
            continue
        if is_inner:
            need = occupied(need, pool.granule)
        if need > 1:
            sync_s = least_sync_s(arcs.gradients[arc], need, pool, pool.groups[k])
            exposed[arc] = max(0.0, sync_s * rules.sync_scale - lead)
        needed[arc] = need
        fewest = min(fewest, need + behind[j])
    return fewest


def fewest_over_levels(
    first_unit: float, second_unit: float, offset: float, j: int, is_inner: bool,
    metric_link: Floats, weight_link: Floats, groups: Integers, rules: SearchRules,
    caps: MetricCaps, next_metrics: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Return the fewest replicas over all link levels of the cut at j, and its least weight.

    The two may belong to different levels: this is a bound.
    """
    levels = len(metric_link) if is_inner else 1
    need, link, widest = -1, math.inf, 0
    for level in range(levels):
        unit = first_unit + metric_link[level][j]
        if is_inner and len(groups) == 1 and level < levels - 1 and not rules.per_replica:
            # no wider stage is linked to the one behind at this level: it cannot do better
            widest = max(widest, groups[0][level])
            share = (rules.num_microbatches + widest - 1) // widest
            least = offset + (share - rules.spared) * unit
            if least > caps.first:
                next_metrics[FIRST] = min(next_metrics[FIRST], least)
                continue
        one = fewest_for_metrics(unit, second_unit, offset, rules, caps, next_metrics)
        if one < 0 or (is_inner and one > widest_linked(groups, level)):
            continue
        if need < 0 or one < need:
            need = one
        link = min(link, weight_link[level][j])
    return need, link
