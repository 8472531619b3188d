"""The label search compiled by numba; `labels_numpy` gives the same labels without it.

Imported only where numba is there. The inner functions take plain arrays and numbers, because
that is what numba compiles; their names are those of `labels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np

from .label_setting import (
    Floats,
    Integers,
    Judged,
    LabelStore,
    Limits,
    Machine,
    Moves,
    Rules,
    last_pin,
    watches_flying,
)

WHOLE = ("used", "flying", "stages", "ranks", "key", "parent", "move", "config", "count", "end",
         "front")  # fmt: skip
"""Columns of whole numbers of a label, as many of the first as there are classes."""

ReducedArrays = tuple[Integers, Integers, Integers, Floats, Floats, float, Floats, float, Integers]
"""Begin of each position's stages, their configuration and index; weight and devices in front;
least weight, weight and price of devices in front, price; fewest replicas of the stages."""

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Machine code for a function, kept between runs where there is a place to keep it."""
    try:
        made: Any = numba.njit(cache=True)(function)
    except RuntimeError:  # nowhere to keep the cache: a read-only home
        made = numba.njit(function)
    result: Callable[P, R] = made
    return result


def run(
    moves: Moves, machine: Machine, rules: Rules, limits: Limits, budget: int
) -> tuple[LabelStore, Floats, bool]:
    """See `labels.search`: all labels, the least values beyond the limits, whether complete."""
    numbers, reals, nexts = _numbers(moves, machine, rules, limits, budget)
    arc_start, arc_config, arc_move, before, demand, least, mixed, price, _ = _reduced(
        moves, machine, numbers, reals, nexts
    )
    nexts[3] = least
    whole, real, begin, finish, complete = _search(
        moves.num_atoms, arc_start, arc_config, arc_move, moves.last, moves.config_class,
        moves.weight, moves.first_unit, moves.second_unit, moves.room, moves.saved,
        moves.gradients, moves.arriving, moves.returning, moves.stage_number, moves.offset,
        moves.lead, before, moves.weight_link, moves.metric_link, demand, mixed, price,
        machine.total, machine.groups, machine.between, machine.speed, machine.latency,
        machine.bandwidth, numbers, reals, nexts,
    )  # fmt: skip
    k = len(machine.total)
    store = LabelStore(
        used=whole[:, :k],
        **{name: whole[:, k + place] for place, name in enumerate(WHOLE[1:])},
        weight=real[:, 0],
        bucket=real[:, 1],
        begin=begin,
        finish=finish,
    )
    return store, nexts, bool(complete)


def judge(moves: Moves, machine: Machine, rules: Rules, limits: Limits) -> Judged:
    """See `labels.judge`."""
    numbers, reals, nexts = _numbers(moves, machine, rules, limits, 0)
    found = _reduced(moves, machine, numbers, reals, nexts)
    count = np.full(moves.weight.shape, -1, dtype=np.int64)
    count[found[1], found[2]] = found[8]
    return Judged(float(found[5]), (float(nexts[0]), float(nexts[1]), float(nexts[2])), count)


def _numbers(
    moves: Moves, machine: Machine, rules: Rules, limits: Limits, budget: int
) -> tuple[Integers, Floats, Floats]:
    """Everything that is one number, for compiled functions; and the least values beyond limits."""
    numbers = np.array(
        [
            rules.num_microbatches, rules.depth, rules.max_ranks, rules.spared,
            int(rules.per_replica), rules.max_replicas, rules.num_stages, rules.max_stages, budget,
            int(watches_flying(moves, rules)), int(rules.count_ranks), last_pin(moves),
        ],
        dtype=np.int64,
    )  # fmt: skip
    reals = np.array(
        [
            limits.first, limits.second, limits.sync, limits.weight, limits.quantum,
            rules.sync_scale, float((machine.total * machine.speed).sum()),
        ]
    )  # fmt: skip
    return numbers, reals, np.full(4, np.inf)


def _reduced(
    moves: Moves, machine: Machine, numbers: Integers, reals: Floats, nexts: Floats
) -> ReducedArrays:
    return _reduce(
        moves.num_atoms, moves.start, moves.last, moves.config_class, moves.weight,
        moves.first_unit, moves.second_unit, moves.room, moves.saved, moves.fewest,
        moves.arriving, moves.returning, moves.gradients, moves.offset, moves.lead,
        moves.weight_link, moves.metric_link, machine.total, machine.granule, machine.groups,
        machine.speed, machine.latency, machine.bandwidth, numbers, reals, nexts,
    )  # fmt: skip


@compiled
def _place(groups: Integers, is_last: bool, end: int, replicas: int) -> int:
    """`DeviceClass.place`."""
    settled = False
    while not settled:
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


@compiled
def _level_of(groups: Integers, first: int, last: int) -> int:
    for level in range(len(groups)):
        if first // groups[level] == last // groups[level]:
            return level
    return len(groups) - 1


@compiled
def _next_count(
    groups: Integers, total: int, is_last: bool, count: int, flying: int, least: int
) -> int:
    """The next number of replicas to try after ``count``; -1 if none.

    Below a whole group of the outermost level but one, every number that fits a level; for the
    last stage of a class, which may have a part of its last group, every number from which on
    it begins further in front. In all other cases only those that leave fewer than ``least``
    micro-batches in flight, which is what the best of those placed so far leaves.
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
    while True:
        following = (low + step - 1) // step * step
        if 0 < border <= following or following + flying >= least:
            return border
        turns = (flying + following - 1) // following
        if following * (1 + turns) < least:
            return following
        if turns <= 1:
            return border
        # as many turns with more replicas leave more in flight
        low = max(following + 1, (flying + turns - 2) // (turns - 1))


@compiled
def _all_reduce(
    size: int, ranks: int, level: int, latency: Floats, bandwidth: Floats, sizes: Integers
) -> float:
    """`Cluster.all_reduce_time_s`."""
    time_s = 0.0
    inner = 1
    for index in range(level + 1):
        members = ranks
        if index != level:
            members = max(1, min(ranks, sizes[index] // inner))
        if members >= 2 and size > 0:
            time_s += 2 * (members - 1) * (latency[index] + size / members / bandwidth[index])
        size = (size + members - 1) // members
        ranks = (ranks + members - 1) // members
        inner = max(inner, sizes[index])
    return time_s


@compiled
def _whole(count: int, granule: int) -> int:
    """Devices taken up by so many replicas; see `Machine.granule`."""
    if granule > 0 and count > granule:
        return (count + granule - 1) // granule * granule
    return count


@compiled
def _least_sync(
    size: int, ranks: int, latency: Floats, bandwidth: Floats, sizes: Integers
) -> float:
    """No so many replicas, nor more of them, sum gradients sooner; see `reduce_numpy`."""
    level = 0
    while level < len(sizes) - 1 and sizes[level] < ranks:
        if sizes[level + 1] < sizes[level]:
            return 0.0
        level += 1
    return _all_reduce(size, ranks, level, latency, bandwidth, sizes)


@compiled
def _beyond(groups: Integers, level: int, count: int) -> bool:
    """`reduce_numpy.beyond`."""
    last = groups.shape[1] - 1
    return bool(groups.shape[0] == 1 and level < last and count > groups[0, : level + 1].max())


@compiled
def _replicas_for(
    unit: float, limit: float, offset: float, spared: int, per_replica: int, m: int, nexts: Floats,
    which: int,
) -> int:  # fmt: skip
    """Fewest replicas that keep a metric within its limit; -1 if none do.

    The least value above the limit that fewer replicas would have goes to ``nexts``.
    """
    if limit == np.inf:
        return 1
    if per_replica:
        if unit <= limit:
            return 1
        if limit <= 0:
            nexts[which] = min(nexts[which], unit / m)
            return -1
        count = int(np.ceil(unit / limit))
        while unit / count > limit:
            count += 1
        while count > 1 and unit / (count - 1) <= limit:
            count -= 1
        nexts[which] = min(nexts[which], unit / (count - 1))
        return count
    if offset + (m - spared) * unit <= limit:
        return 1
    if unit <= 0 or limit < offset:
        nexts[which] = min(nexts[which], offset + (1 - spared) * unit)
        return -1
    most = int((limit - offset) / unit) + spared
    most = max(min(most, m - 1), 0)
    while most < m and offset + (most + 1 - spared) * unit <= limit:
        most += 1
    while most > 0 and offset + (most - spared) * unit > limit:
        most -= 1
    nexts[which] = min(nexts[which], offset + (most + 1 - spared) * unit)
    if most < 1:
        return -1
    return (m + most - 1) // most


@compiled
def _needed(
    unit: float, second: float, limit: float, second_limit: float, offset: float, spared: int,
    per_replica: int, m: int, nexts: Floats,
) -> int:  # fmt: skip
    """Fewest replicas that keep both metrics within their limits; -1 if none do."""
    count = _replicas_for(unit, limit, offset, spared, per_replica, m, nexts, 0)
    if second > 0:
        other = _replicas_for(second, second_limit, 0.0, spared, per_replica, m, nexts, 1)
        count = -1 if min(count, other) < 0 else max(count, other)
    return count


@compiled
def _raised(
    need: int, most: int, behind: int, room: int, saved: int, buffer: int, m: int, depth: int
) -> int:  # fmt: skip
    """Fewest replicas, at least ``need``, that fit the memory; -1 if not even ``most`` do."""
    if need > most:
        return -1
    if _fits(need, behind, room, saved, buffer, m, depth):
        return need
    if not _fits(most, behind, room, saved, buffer, m, depth):
        return -1
    low, step = need, 1
    high = min(low + step, most)
    while not _fits(high, behind, room, saved, buffer, m, depth):
        low, step = high, 2 * step
        high = min(low + step, most)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(middle, behind, room, saved, buffer, m, depth):
            high = middle
        else:
            low = middle
    return high


@compiled
def _fits(count: int, behind: int, room: int, saved: int, buffer: int, m: int, depth: int) -> bool:
    """Whether a stage of so many replicas fits its devices."""
    share = (m + count - 1) // count
    held = 1
    if depth == 0:
        held = min(share, 1 + (behind + count - 1) // count)
    elif depth == 1:
        held = share
    else:
        share = 1
    return bool(room - share * buffer - held * saved >= 0)


@compiled
def _reduce(
    num_atoms: int, start: Integers, last: Integers, config_class: Integers, weight: Floats,
    first_unit: Floats, second_unit: Floats, room: Integers, saved: Integers,
    fewest: Integers, arriving: Integers, returning: Integers, gradients: Integers,
    offset: Floats, lead: Floats,
    weight_link: Floats, metric_link: Floats, total: Integers, granule: int, groups: Integers,
    speed: Floats, latency: Floats, bandwidth: Floats, numbers: Integers, reals: Floats,
    nexts: Floats,
) -> ReducedArrays:  # fmt: skip
    """`reduce_numpy.reduce`: the stages left, and what is in front of every position."""
    m, depth, _, spared, per_replica, max_replicas = (
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5],
    )  # fmt: skip
    limit_first, limit_second, limit_sync, limit_weight, sync_scale, power = (
        reals[0], reals[1], reals[2], reals[3], reals[5], reals[6],
    )  # fmt: skip
    num_configs, num_moves = weight.shape
    levels = metric_link.shape[0]
    count = np.full((num_configs, num_moves), -1, dtype=np.int64)
    cost = np.zeros((num_configs, num_moves))
    behind = np.full(num_atoms + 1, 2**40, dtype=np.int64)
    behind[num_atoms] = 0
    # micro-batches of a replica of the widest stage that a level can join to the one behind
    most_at = np.zeros(levels, dtype=np.int64)
    if len(groups) == 1:
        for level in range(levels - 1):
            widest = groups[0, : level + 1].max()
            most_at[level] = (m + widest - 1) // widest
    for i in range(num_atoms - 1, -1, -1):
        for c in range(num_configs):
            k = config_class[c]
            for e in range(start[i], start[i + 1]):
                j = last[e]
                if room[c, e] < 0:
                    continue
                need = -1
                link = np.inf
                for level in range(1 if j == num_atoms else levels):
                    unit = first_unit[c, e] + metric_link[level, j]
                    if j < num_atoms and most_at[level] > 0 and not per_replica:
                        beyond = offset[i] + (most_at[level] - spared) * unit
                        if beyond > limit_first:
                            nexts[0] = min(nexts[0], beyond)
                            continue
                    one = _needed(
                        unit, second_unit[c, e], limit_first,
                        limit_second, offset[i], spared, per_replica, m, nexts,
                    )  # fmt: skip
                    if one < 0 or (j < num_atoms and _beyond(groups, level, one)):
                        continue
                    if need < 0 or one < need:
                        need = one
                    link = min(link, weight_link[level, j])
                if need < 0 or behind[j] >= 2**40:
                    continue
                need = max(need, fewest[c, e])
                need = _raised(
                    need, min(total[k], max_replicas, m), behind[j], room[c, e], saved[c, e],
                    arriving[i] + returning[j], m, depth,
                )  # fmt: skip
                if need < 0:
                    continue
                if j < num_atoms:
                    need = _whole(need, granule)
                if need > 1:
                    sync = _least_sync(gradients[e], need, latency, bandwidth, groups[k])
                    sync = sync * sync_scale - lead[i]
                    if sync > limit_sync and sync > 0:
                        nexts[2] = min(nexts[2], sync)
                        continue
                count[c, e] = need
                cost[c, e] = weight[c, e] + link
                behind[i] = min(behind[i], need + behind[j])
    arc_start, arc_config, arc_move = _arcs(num_atoms, start, count)
    num_arcs = len(arc_move)
    arc_last = np.zeros(num_arcs, dtype=np.int64)
    arc_cost = np.zeros(num_arcs)
    arc_power = np.zeros(num_arcs)
    for arc in range(num_arcs):
        c, e = arc_config[arc], arc_move[arc]
        arc_last[arc] = last[e]
        arc_cost[arc] = cost[c, e]
        arc_power[arc] = _whole(count[c, e], granule) * speed[config_class[c]]
    front_weight = np.zeros(num_atoms + 1)
    front_power = np.zeros(num_atoms + 1)
    back_weight = np.zeros(num_atoms + 1)
    back_power = np.zeros(num_atoms + 1)
    mixed_front = np.zeros(num_atoms + 1)
    mixed_back = np.zeros(num_atoms + 1)
    slack = power * (1 + 1e-9) + 1e-9
    least, best_price = np.inf, 0.0
    reachable = behind[0] < 2**40
    if reachable:
        _sweep(num_atoms, arc_start, arc_last, arc_cost, arc_power, 1.0, 0.0, front_weight,
               back_weight)  # fmt: skip
        _sweep(num_atoms, arc_start, arc_last, arc_cost, arc_power, 0.0, 1.0, front_power,
               back_power)  # fmt: skip
        reachable = back_power[0] <= slack
    if not reachable:
        front_weight[:] = 0.0
        nothing = np.zeros(0, dtype=np.int64)
        return (
            np.zeros(num_atoms + 1, dtype=np.int64), nothing, nothing, front_weight, front_weight,
            least, front_weight, best_price, nothing,
        )  # fmt: skip
    least = back_weight[0]
    light, light_power = _trace(
        num_atoms, arc_start, arc_last, arc_cost, arc_power, 1.0, 0.0, back_weight
    )
    heavy, heavy_power = _trace(
        num_atoms, arc_start, arc_last, arc_cost, arc_power, 0.0, 1.0, back_power
    )
    if light_power > power:
        for _ in range(6):  # Handler and Zang's secant on the price of a device
            if light_power <= heavy_power:
                break
            price = (heavy - light) / (light_power - heavy_power)
            if price <= 0:
                break
            best_price = price
            _sweep(num_atoms, arc_start, arc_last, arc_cost, arc_power, 1.0, price, mixed_front,
                   mixed_back)  # fmt: skip
            least = max(least, mixed_back[0] - price * slack)
            w, p = _trace(
                num_atoms, arc_start, arc_last, arc_cost, arc_power, 1.0, price, mixed_back
            )
            if mixed_back[0] >= (light + price * light_power) * (1 - 1e-12):
                break
            if p <= power:
                heavy, heavy_power = w, p
            else:
                light, light_power = w, p
    size, arc_count = 0, np.zeros(num_arcs, dtype=np.int64)
    for i in range(num_atoms):
        begin = arc_start[i]
        arc_start[i] = size
        for arc in range(begin, arc_start[i + 1]):
            j, r = arc_last[arc], arc_power[arc]
            keep = front_power[i] + r + back_power[j] <= slack
            keep = keep and not front_weight[i] + arc_cost[arc] + back_weight[j] > limit_weight
            if keep and best_price > 0:
                keep = not (
                    mixed_front[i] + (arc_cost[arc] + best_price * r) + mixed_back[j]
                    > limit_weight + best_price * slack
                )
            if keep:
                arc_count[size] = count[arc_config[arc], arc_move[arc]]
                arc_config[size] = arc_config[arc]
                arc_move[size] = arc_move[arc]
                size += 1
    arc_start[num_atoms] = size
    if best_price == 0:
        mixed_front = front_weight
    return (
        arc_start, arc_config[:size], arc_move[:size], front_weight, front_power, least,
        mixed_front, best_price, arc_count[:size],
    )  # fmt: skip


@compiled
def _sweep(
    num_atoms: int, start: Integers, last: Integers, cost: Floats, power: Floats,
    of_weight: float, of_power: float, front: Floats, back: Floats,
) -> None:  # fmt: skip
    """Cheapest ways from position 0 and to position N, resources left aside."""
    front[:] = np.inf
    back[:] = np.inf
    front[0] = 0.0
    back[num_atoms] = 0.0
    for i in range(num_atoms):
        if front[i] < np.inf:
            for arc in range(start[i], start[i + 1]):
                step = of_weight * cost[arc] + of_power * power[arc]
                front[last[arc]] = min(front[last[arc]], front[i] + step)
    for i in range(num_atoms - 1, -1, -1):
        for arc in range(start[i], start[i + 1]):
            step = of_weight * cost[arc] + of_power * power[arc]
            back[i] = min(back[i], step + back[last[arc]])


@compiled
def _trace(
    num_atoms: int, start: Integers, last: Integers, cost: Floats, power: Floats,
    of_weight: float, of_power: float, back: Floats,
) -> tuple[float, float]:  # fmt: skip
    """Weight and devices of the cheapest way that `_sweep` found."""
    i, weight, used = 0, 0.0, 0.0
    while i < num_atoms:
        least, best = np.inf, -1
        for arc in range(start[i], start[i + 1]):
            way = of_weight * cost[arc] + of_power * power[arc] + back[last[arc]]
            if way < least:
                least, best = way, arc
        weight += cost[best]
        used += power[best]
        i = last[best]
    return weight, used


@compiled
def _arcs(num_atoms: int, start: Integers, count: Integers) -> tuple[Integers, Integers, Integers]:
    """The stages that can be, by first position, then configuration, then last position."""
    total = 0
    for c in range(count.shape[0]):
        for e in range(count.shape[1]):
            total += int(count[c, e] >= 0)
    arc_start = np.zeros(num_atoms + 1, dtype=np.int64)
    arc_config = np.zeros(total, dtype=np.int64)
    arc_move = np.zeros(total, dtype=np.int64)
    size = 0
    for i in range(num_atoms):
        arc_start[i] = size
        for c in range(count.shape[0]):
            for e in range(start[i], start[i + 1]):
                if count[c, e] >= 0:
                    arc_config[size] = c
                    arc_move[size] = e
                    size += 1
    arc_start[num_atoms] = size
    return arc_start, arc_config, arc_move


@compiled
def _offer(
    whole: Integers, real: Floats, begin: int, size: int, label: Integers, w: float, step: float,
    watched: Integers, key_at: int,
) -> int:  # fmt: skip
    """Put a label among those from ``begin`` on, unless one is at least as good; the new size.

    Labels that it beats go; the others keep their order. There is room for one more.
    """
    target = begin
    for other in range(begin, size):
        if whole[other, key_at] == label[key_at]:
            worse = real[other, 1] <= step
            better = real[other, 1] >= step
            for column in range(key_at):
                if watched[column]:
                    if whole[other, column] > label[column]:
                        worse = False
                    elif whole[other, column] < label[column]:
                        better = False
            if worse and better:  # equal: the smaller weight stays
                better = real[other, 0] > w
                worse = not better
            if worse:
                return size
            if better:
                continue
        if target != other:
            whole[target] = whole[other]
            real[target] = real[other]
        target += 1
    whole[target] = label
    real[target, 0] = w
    real[target, 1] = step
    return target + 1


@compiled
def _search(
    num_atoms: int, arc_start: Integers, arc_config: Integers, arc_move: Integers,
    last: Integers, config_class: Integers, weight: Floats, first_unit: Floats,
    second_unit: Floats, room: Integers, saved: Integers, gradients: Integers,
    arriving: Integers, returning: Integers, stage_number: Integers, offset: Floats,
    lead: Floats, weight_before: Floats, weight_link: Floats, metric_link: Floats,
    demand: Floats, mixed: Floats, price: float, total: Integers, groups: Integers,
    between: Integers, speed: Floats, latency: Floats, bandwidth: Floats, numbers: Integers,
    reals: Floats, nexts: Floats,
) -> tuple[Integers, Floats, Integers, Integers, bool]:  # fmt: skip
    m, depth, max_ranks, spared, per_replica, max_replicas, num_stages, max_stages, budget = (
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6],
        numbers[7], numbers[8],
    )  # fmt: skip
    flies, count_ranks, last_pin = numbers[9] != 0, numbers[10] != 0, numbers[11]
    limit_first, limit_second, limit_sync, limit_weight, quantum, sync_scale, power = (
        reals[0], reals[1], reals[2], reals[3], reals[4], reals[5], reals[6],
    )  # fmt: skip
    slack = power * (1 + 1e-9) + 1e-9
    num_classes, levels = groups.shape
    residue = np.ones(num_classes, dtype=np.int64)
    if levels > 1:
        for k in range(num_classes):
            residue[k] = groups[k, : levels - 1].max()
    flying_at, stages_at, ranks_at, key_at = (
        num_classes, num_classes + 1, num_classes + 2, num_classes + 3,
    )  # fmt: skip
    watched = np.ones(key_at, dtype=np.int64)
    watched[flying_at], watched[stages_at], watched[ranks_at] = (
        int(flies), int(max_stages > 0), int(count_ranks),
    )  # fmt: skip
    capacity = 1024
    whole = np.zeros((capacity, num_classes + 10), dtype=np.int64)
    real = np.zeros((capacity, 2))
    whole[0, key_at + 1 : key_at + 4] = -1
    begin = np.zeros(num_atoms + 1, dtype=np.int64)
    finish = np.zeros(num_atoms + 1, dtype=np.int64)
    finish[num_atoms] = 1
    size, looked = 1, 0
    needed = np.zeros(levels, dtype=np.int64)
    unused = np.full(3, np.inf)
    made = np.zeros(num_classes + 10, dtype=np.int64)

    for i in range(num_atoms - 1, -1, -1):
        begin[i] = size
        for arc in range(arc_start[i], arc_start[i + 1]):
            if looked > budget:
                break
            c, e = arc_config[arc], arc_move[arc]
            k, j = config_class[c], last[e]
            cut_levels = 1 if j == num_atoms else levels
            for level in range(cut_levels):
                needed[level] = _needed(
                    first_unit[c, e] + metric_link[level, j], second_unit[c, e], limit_first,
                    limit_second, offset[i], spared, per_replica, m, unused,
                )  # fmt: skip
                if j < num_atoms and _beyond(groups, level, needed[level]):
                    needed[level] = -1
            buffer = arriving[i] + returning[j]
            for label in range(begin[j], finish[j]):
                number = whole[label, stages_at] + 1
                front = stage_number[e]
                if whole[label, key_at + 6] > 0:
                    front = whole[label, key_at + 6] - 1
                    if front < 1 or (stage_number[e] > 0 and stage_number[e] != front):
                        continue
                if front > 0 and (i == 0) != (front == 1):
                    continue
                if num_stages > 0 and (number > num_stages or (i == 0) != (number == num_stages)):
                    continue
                if max_stages > 0 and number > max_stages - (i > 0):
                    continue
                # a label may be heavier than the one it stands for, by a quantum a stage
                limit = limit_weight + (quantum * number if quantum > 0 else 0.0)
                if real[label, 0] + weight[c, e] + weight_before[i] > limit:
                    continue
                free = total[k] - whole[label, k]
                left = power
                for kk in range(num_classes):
                    left -= whole[label, kk] * speed[kk]
                most = min(free, max_replicas, m, max_ranks - whole[label, ranks_at])
                flying, is_last = whole[label, flying_at], whole[label, k] == 0
                for level in range(cut_levels):
                    need = needed[level]
                    if need < 0 or need > most:
                        continue
                    w = real[label, 0] + (weight[c, e] + weight_link[level, j])
                    spare = left - need * speed[k]
                    if w + weight_before[i] > limit:
                        continue
                    if demand[i] > spare + left * 1e-9 + 1e-9:
                        continue
                    if price > 0 and (
                        w + price * (power - spare) + mixed[i] > limit + price * slack
                    ):
                        continue
                    need = _raised(need, most, flying, room[c, e], saved[c, e], buffer, m, depth)
                    if need < 0:
                        continue
                    count, least = need, 2**60
                    while 0 < count <= most:
                        if j < num_atoms and _beyond(groups, level, count):
                            break
                        left_behind = count * (1 + (flying + count - 1) // count)
                        after = left_behind if flies else 0
                        previous = -1
                        for pad in range(levels):
                            looked += 1 + num_classes // 4
                            start_at = free
                            if pad > 0:
                                start_at = free // groups[k, pad - 1] * groups[k, pad - 1]
                            end = _place(groups[k], is_last, start_at, count)
                            if end < 0 or end == previous:
                                previous = end
                                continue
                            previous = end
                            cut = 0
                            if j < num_atoms:
                                other_class = config_class[whole[label, key_at + 3]]
                                if other_class == k:
                                    cut = _level_of(groups[k], end - 1, free)
                                else:
                                    cut = between[k, other_class]
                                if cut != level:
                                    continue
                            least = min(least, left_behind)
                            if count > 1:
                                group = _level_of(groups[k], end - count, end - 1)
                                sync = (
                                    _all_reduce(
                                        gradients[e], count, group, latency, bandwidth, groups[k]
                                    )
                                    * sync_scale
                                    - lead[i]
                                )
                                if sync > limit_sync and sync > 0:
                                    nexts[2] = min(nexts[2], sync)
                                    continue
                            left_now = power
                            for kk in range(num_classes):
                                made[kk] = whole[label, kk]
                            made[k] = total[k] - (end - count)
                            for kk in range(num_classes):
                                left_now -= made[kk] * speed[kk]
                            if demand[i] > left_now * (1 + 1e-9) + 1e-9:
                                continue
                            if price > 0 and (
                                w + price * (power - left_now) + mixed[i] > limit + price * slack
                            ):
                                continue
                            code = 0
                            for kk in range(num_classes):
                                code = code * residue[kk] + (total[kk] - made[kk]) % residue[kk]
                            if num_classes > 1 and levels > 1:
                                code = code * num_classes + k
                            if num_stages > 0:
                                code = code * (num_stages + 1) + number
                            if last_pin > 0:
                                code = code * (last_pin + 1) + front
                            step = w
                            if quantum > 0:
                                step = 0.0 if quantum == np.inf else np.floor(w / quantum)
                            made[flying_at] = after
                            made[stages_at] = number
                            made[ranks_at] = whole[label, ranks_at] + count
                            made[key_at] = code
                            made[key_at + 1] = label
                            made[key_at + 2] = e
                            made[key_at + 3] = c
                            made[key_at + 4] = count
                            made[key_at + 5] = end
                            made[key_at + 6] = front
                            if size == capacity:
                                capacity *= 2
                                whole = _longer(whole, capacity)
                                real = _longer(real, capacity)
                            looked += (size - begin[i]) * key_at // 64  # compared with each
                            size = _offer(
                                whole, real, begin[i], size, made, w, step, watched, key_at
                            )
                        count = _next_count(groups[k], total[k], is_last, count, flying, least)
        finish[i] = size
        if looked > budget:
            break
    return whole[:size], real[:size], begin, finish, looked <= budget


@compiled
def _longer(rows, capacity):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The same rows with room for more; of whole or of real numbers."""
    longer = np.zeros((capacity, rows.shape[1]), dtype=rows.dtype)
    longer[: len(rows)] = rows
    return longer
