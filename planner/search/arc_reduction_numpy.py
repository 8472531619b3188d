"""The stages left once each is judged apart from the others, with numpy; see `labels.judge`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .label_setting import (
    DEPTH_ALL,
    DEPTH_PIPELINE,
    Floats,
    Integers,
    Limits,
    Machine,
    Mask,
    Moves,
    Rules,
)  # fmt: skip

FAR = 2**40
"""More replicas than anyone has: the count of a stage that cannot be."""


class Needs:
    """Fewest replicas by the metrics' limits, for many stages at once.

    Attributes:
        nexts: Least values above the limits that fewer replicas would have.
    """

    def __init__(self, moves: Moves, rules: Rules, limits: Limits) -> None:
        self.moves, self.rules, self.limits = moves, rules, limits
        self.nexts = np.full(4, np.inf)

    def counts(
        self, offset: Floats | float, config: Integers, move: Integers, levels: Integers
    ) -> Integers:
        """`FAR` where no number of replicas will do."""
        moves, limits = self.moves, self.limits
        last = moves.last[move]
        unit = moves.first_unit[config, move] + moves.metric_link[levels, last]
        offsets = np.broadcast_to(np.asarray(offset, dtype=np.float64), unit.shape)
        needed = self._replicas_for(unit, limits.first, offsets, 0)
        second = moves.second_unit[config, move]
        with_second = second > 0
        if with_second.any():
            nothing = np.zeros(int(with_second.sum()))
            other = self._replicas_for(second[with_second], limits.second, nothing, 1)
            needed[with_second] = np.maximum(needed[with_second], other)
        return needed

    def _replicas_for(self, unit: Floats, limit: float, offset: Floats, which: int) -> Integers:
        """`labels_kernel._replicas_for` for many units."""
        rules = self.rules
        m, spared = rules.num_microbatches, rules.spared
        counts = np.ones(len(unit), dtype=np.int64)
        if limit == np.inf or not len(unit):
            return counts
        if rules.per_replica:
            return self._replicas_per(unit, limit, which)
        tight = np.flatnonzero(~(offset + (m - spared) * unit <= limit))
        x, start = unit[tight], offset[tight]
        never = (x <= 0) | (limit < start)
        safe = np.where(x > 0, x, 1.0)
        most = np.trunc(np.clip((limit - start) / safe, 0.0, float(m))).astype(np.int64) + spared
        most = np.maximum(np.minimum(most, m - 1), 0)
        for _ in range(3):
            most += (most < m) & (start + (most + 1 - spared) * x <= limit)
        for _ in range(3):
            most -= (most > 0) & (start + (most - spared) * x > limit)
        most[never] = 0
        if len(tight):
            beyond = start + (most + 1 - spared) * x
            self.nexts[which] = min(self.nexts[which], float(beyond.min()))
        counts[tight] = np.where(most < 1, FAR, -(-m // np.maximum(most, 1)))
        return counts

    def _replicas_per(self, unit: Floats, limit: float, which: int) -> Integers:
        counts = np.ones(len(unit), dtype=np.int64)
        tight = np.flatnonzero(~(unit <= limit))
        x = unit[tight]
        if not len(tight):
            return counts
        if limit <= 0:
            m = self.rules.num_microbatches
            self.nexts[which] = min(self.nexts[which], float((x / m).min()))
            counts[tight] = FAR
            return counts
        count = np.ceil(np.minimum(x / limit, float(FAR))).astype(np.int64)
        for _ in range(3):
            count += x / count > limit
        for _ in range(3):
            count -= (count > 1) & (x / np.maximum(count - 1, 1) <= limit)
        self.nexts[which] = min(self.nexts[which], float((x / (count - 1)).min()))
        counts[tight] = count
        return counts


def raised(
    moves: Moves,
    rules: Rules,
    first: int,
    config: Integers,
    move: Integers,
    behind: Integers,
    need: Integers,
    most: Integers,
) -> Integers:
    """Fewest replicas, at least ``need``, that fit the memory; -1 if not even ``most`` do."""
    m = rules.num_microbatches
    buffer = moves.arriving[first] + moves.returning[moves.last[move]]
    room, saved = moves.room[config, move], moves.saved[config, move]

    def fits(count: Integers) -> Mask:
        share = -(-m // count)
        held = np.ones_like(share)
        if rules.depth == DEPTH_PIPELINE:
            held = np.minimum(share, 1 - (-behind // count))
        elif rules.depth == DEPTH_ALL:
            held = share
        else:
            share = np.ones_like(share)
        enough: Mask = room - share * buffer - held * saved >= 0
        return enough

    possible = need <= most
    good = possible & fits(np.maximum(need, 1))
    if good.all():
        return need
    count: Integers = np.where(good, need, -1)
    searching = possible & ~good
    if searching.any():
        searching &= fits(np.maximum(most, 1))
    if searching.any():
        low, step = np.where(searching, need, 0), 1
        high = np.where(searching, np.minimum(low + step, most), 0)
        short = searching & ~fits(np.maximum(high, 1))
        while short.any():
            step *= 2
            low = np.where(short, high, low)
            high = np.where(short, np.minimum(low + step, most), high)
            short &= ~fits(np.maximum(high, 1))
        while (high - low > 1).any():
            middle = (low + high) // 2
            enough = fits(np.maximum(middle, 1))
            wide = high - low > 1
            high = np.where(wide & enough, middle, high)
            low = np.where(wide & ~enough, middle, low)
        count = np.where(searching, high, count)
    return count


@dataclass(frozen=True, eq=False)
class Reduced:
    """What remains of a search once every stage is judged apart from the others.

    Attributes:
        alive: Stages that may still be part of a better plan, shape (C, E).
        count: Fewest replicas of each stage, shape (C, E).
        front_weight: Least weight in front of each position, shape (N + 1,).
        front_power: Least devices in front of it, in those of the slowest class.
        least_weight: No path has less; infinite where there is none.
        price: Seconds charged for a device, 0 for none.
        front_mixed: Least weight and price of devices in front of each position.
    """

    alive: Mask
    count: Integers
    front_weight: Floats
    front_power: Floats
    least_weight: float
    price: float
    front_mixed: Floats


def reduce(moves: Moves, machine: Machine, rules: Rules, limits: Limits, needs: Needs) -> Reduced:
    """Drop the stages that no plan within the limits can have.

    Replicas of every stage are the fewest by its own metrics and memory, given the fewest that
    can be behind it. Then the shortest ways to and from it by weight, by devices, and by both at
    a price of a device (Handler and Zang 1980) say whether it can be part of a plan.
    """
    count, link = _fewest_replicas(moves, machine, rules, limits, needs)
    zeros = np.zeros(moves.num_atoms + 1)
    none = Reduced(np.zeros(count.shape, dtype=np.bool_), count, zeros, zeros, np.inf, 0.0, zeros)
    cost = moves.weight + link
    power = _whole(machine, count) * machine.speed[moves.config_class][:, None]
    sweep = _Sweep(moves, count >= 0, cost, power)
    total = float((machine.total * machine.speed).sum())
    slack = total * (1 + 1e-9) + 1e-9
    front_weight, back_weight = sweep.both_ways(1.0, 0.0)
    front_power, back_power = sweep.both_ways(0.0, 1.0)
    if not back_power[0] <= slack:
        return none
    light, light_power = sweep.trace(1.0, 0.0, back_weight)
    heavy, heavy_power = sweep.trace(0.0, 1.0, back_power)
    least, price, mixed = float(back_weight[0]), 0.0, None
    if light_power > total:
        for _ in range(6):
            if light_power <= heavy_power:
                break
            step = (heavy - light) / (light_power - heavy_power)
            if step <= 0:
                break
            price = step
            mixed = sweep.both_ways(1.0, price)
            least = max(least, float(mixed[1][0] - price * slack))
            w, p = sweep.trace(1.0, price, mixed[1])
            if mixed[1][0] >= (light + price * light_power) * (1 - 1e-12):
                break
            if p <= total:
                heavy, heavy_power = w, p
            else:
                light, light_power = w, p
    first = np.repeat(np.arange(moves.num_atoms), np.diff(moves.start))
    last = moves.last
    alive = (count >= 0) & (front_power[first] + power + back_power[last] <= slack)
    alive &= ~(front_weight[first] + cost + back_weight[last] > limits.weight)
    if mixed is not None:
        both = mixed[0][first] + (cost + price * power) + mixed[1][last]
        alive &= ~(both > limits.weight + price * slack)
    front_mixed = front_weight if mixed is None else mixed[0]
    return Reduced(alive, count, front_weight, front_power, least, price, front_mixed)


def _fewest_replicas(
    moves: Moves, machine: Machine, rules: Rules, limits: Limits, needs: Needs
) -> tuple[Integers, Floats]:
    """For every stage the fewest replicas it can have, -1 where it cannot be; its least link."""
    n = moves.num_atoms
    count = np.full(moves.weight.shape, -1, dtype=np.int64)
    behind = np.full(n + 1, FAR, dtype=np.int64)
    behind[n] = 0
    limit = min(rules.max_replicas, rules.num_microbatches)
    needed, link = _least_needed(moves, machine, needs)
    for i in range(n - 1, -1, -1):
        span = slice(int(moves.start[i]), int(moves.start[i + 1]))
        last = moves.last[span]
        usable = (moves.room[:, span] >= 0) & (needed[:, span] < FAR) & (behind[last] < FAR)
        config, move = np.nonzero(usable)
        if not len(config):
            continue
        move = move + span.start
        classes = moves.config_class[config]
        after = behind[moves.last[move]]
        most = np.minimum(machine.total[classes], limit)
        least = np.maximum(needed[config, move], moves.fewest[config, move])
        found = raised(moves, rules, i, config, move, after, least, most)
        inner = moves.last[move] < n
        found = np.where(inner, _whole(machine, found), found)
        good = found > 0
        if limits.sync < np.inf:
            several = np.flatnonzero(good & (found > 1))
            groups, gradients = machine.groups[classes[several]], moves.gradients[move[several]]
            sync = _least_sync(machine, gradients, found[several], groups)
            sync = sync * rules.sync_scale - moves.lead[i]
            late = (sync > limits.sync) & (sync > 0)
            if late.any():
                needs.nexts[2] = min(needs.nexts[2], float(sync[late].min()))
                good[several[late]] = False
        if good.any():
            behind[i] = int((found[good] + after[good]).min())
        count[config[good], move[good]] = found[good]
    return count, link


def _whole(machine: Machine, count: Integers) -> Integers:
    """Devices taken up by so many replicas; see `Machine.granule`."""
    if not machine.granule:
        return count
    whole = -(-count // machine.granule) * machine.granule
    taken: Integers = np.where(count > machine.granule, whole, count)
    return taken


def _least_needed(moves: Moves, machine: Machine, needs: Needs) -> tuple[Integers, Floats]:
    """For every stage that may be: fewest replicas by metrics over all levels; its least link."""
    config, move = np.nonzero(moves.room >= 0)
    first = np.repeat(np.arange(moves.num_atoms), np.diff(moves.start))
    offset, last = moves.offset[first[move]], moves.last[move]
    inner = last < moves.num_atoms
    least, cheapest = np.full(len(move), FAR, dtype=np.int64), np.full(len(move), np.inf)
    for level in range(moves.metric_link.shape[0]):
        some = inner if level else np.ones_like(inner)
        some = some & ~_too_wide(moves, machine, needs, offset, config, move, level)
        c, e = config[some], move[some]
        count = needs.counts(offset[some], c, e, np.full(len(e), level))
        able = (count < FAR) & ~(inner[some] & beyond(machine, level, count))
        least[some] = np.minimum(least[some], np.where(able, count, FAR))
        cheaper = np.minimum(cheapest[some], moves.weight_link[level, last[some]])
        cheapest[some] = np.where(able, cheaper, cheapest[some])
    needed, link = np.full(moves.room.shape, FAR, dtype=np.int64), np.zeros(moves.room.shape)
    needed[config, move] = least
    link[config, move] = np.where(least < FAR, cheapest, 0.0)
    return needed, link


def _too_wide(
    moves: Moves, machine: Machine, needs: Needs, offset: Floats, config: Integers,
    move: Integers, level: int,
) -> Mask:  # fmt: skip
    """Stages whose first metric needs more replicas than can be linked at a level; see `beyond`.

    What the metric is with as many as can be is noted as beyond the limit.
    """
    rules, limit = needs.rules, needs.limits.first
    last = moves.last[move]
    if rules.per_replica or len(machine.groups) > 1 or level == machine.groups.shape[1] - 1:
        return np.zeros(len(move), dtype=np.bool_)
    share = -(-rules.num_microbatches // int(machine.groups[0, : level + 1].max()))
    unit = moves.first_unit[config, move] + moves.metric_link[level, last]
    least = offset + (share - rules.spared) * unit
    wide: Mask = (last < moves.num_atoms) & (least > limit)
    if wide.any():
        needs.nexts[0] = min(needs.nexts[0], float(least[wide].min()))
    return wide


def beyond(machine: Machine, level: int | Integers, count: Integers) -> Mask:
    """Whether stages of so many replicas are never linked at a level to the one behind.

    Beyond a group's size they are whole groups, and what follows is in another group. Devices of
    another class may be in the same one, so nothing is known of several classes.
    """
    if len(machine.groups) > 1:
        return np.zeros(len(count), dtype=np.bool_)
    widest = np.maximum.accumulate(machine.groups[0])
    apart: Mask = (np.asarray(level) < len(widest) - 1) & (count > widest[level])
    return apart


def _least_sync(machine: Machine, size: Integers, ranks: Integers, groups: Integers) -> Floats:
    """No so many replicas, nor more of them, sum gradients sooner.

    They meet in the smallest group that holds them all. Where groups of an outer level are
    smaller, as those of a class of few devices in each can be, nothing is known.
    """
    if not len(size):
        return np.zeros(0)
    widest = np.maximum.accumulate(groups, axis=1)
    level = np.minimum((widest < ranks[:, None]).sum(axis=1), groups.shape[1] - 1)
    within = np.arange(groups.shape[1] - 1) < level[:, None]
    regular = ~((np.diff(groups, axis=1) < 0) & within).any(axis=1)
    return np.where(regular, all_reduce(machine, size, ranks, level, groups), 0.0)


def all_reduce(
    machine: Machine, size: Integers, ranks: Integers, level: Integers, groups: Integers
) -> Floats:
    """`Cluster.all_reduce_time_s` for many."""
    time_s, inner = np.zeros(len(size)), np.ones(len(size), dtype=np.int64)
    for index in range(groups.shape[1]):
        here = index <= level
        members = np.minimum(ranks, np.maximum(groups[:, index] // inner, 1))
        members = np.where(index == level, ranks, members)
        message_s = machine.latency[index] + size / members / machine.bandwidth[index]
        ring = 2 * (members - 1) * message_s
        time_s = np.where(here & (members >= 2) & (size > 0), time_s + ring, time_s)
        size = np.where(here, -(-size // members), size)
        ranks = np.where(here, -(-ranks // members), ranks)
        inner = np.maximum(inner, groups[:, index])
    return time_s


class _Sweep:
    """Shortest ways over all stages that can be, resources left aside."""

    def __init__(self, moves: Moves, usable: Mask, cost: Floats, power: Floats) -> None:
        self.moves, self.usable, self.cost, self.power = moves, usable, cost, power

    def _steps(self, of_weight: float, of_power: float) -> Floats:
        steps: Floats = np.where(self.usable, of_weight * self.cost + of_power * self.power, np.inf)
        return steps

    def both_ways(self, of_weight: float, of_power: float) -> tuple[Floats, Floats]:
        """Cheapest ways from position 0, and to position N."""
        moves, n = self.moves, self.moves.num_atoms
        steps = self._steps(of_weight, of_power).min(axis=0)
        front, back = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
        front[0] = back[n] = 0.0
        for i in range(n):
            if front[i] < np.inf:
                span = slice(int(moves.start[i]), int(moves.start[i + 1]))
                last = moves.last[span]
                front[last] = np.minimum(front[last], front[i] + steps[span])
        for i in range(n - 1, -1, -1):
            span = slice(int(moves.start[i]), int(moves.start[i + 1]))
            if span.start < span.stop:
                back[i] = (steps[span] + back[moves.last[span]]).min()
        return front, back

    def trace(self, of_weight: float, of_power: float, back: Floats) -> tuple[float, float]:
        """Weight and devices of the cheapest way."""
        moves, i = self.moves, 0
        steps = self._steps(of_weight, of_power)
        weight = power = 0.0
        while i < moves.num_atoms:
            span = slice(int(moves.start[i]), int(moves.start[i + 1]))
            ways = steps[:, span] + back[moves.last[span]]
            c, e = divmod(int(np.argmin(ways)), ways.shape[1])
            weight += float(self.cost[c, span.start + e])
            power += float(self.power[c, span.start + e])
            i = int(moves.last[span.start + e])
        return weight, power
