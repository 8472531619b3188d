"""The label search without numba: the same labels, a position at a time with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .labels import (
    COLUMNS,
    DEPTH_ALL,
    DEPTH_PIPELINE,
    Floats,
    Integers,
    Judged,
    LabelStore,
    Limits,
    Machine,
    Mask,
    Moves,
    Rules,
    empty_store,
    last_pin,
    watches_flying,
)

SCANNED = 16
"""Labels that are compared in the time it takes to make one."""

FAR = 2**40
"""More replicas than anyone has: the count of a stage that cannot be."""


def run(
    moves: Moves, machine: Machine, rules: Rules, limits: Limits, budget: int
) -> tuple[LabelStore, Floats, bool]:
    """See `labels.search`: all labels, the least values beyond the limits, whether complete."""
    needs = Needs(moves, rules, limits)
    reduced = reduce(moves, machine, rules, limits, needs)
    needs.nexts[3] = reduced.least_weight
    return _Run(moves, machine, rules, limits, needs, reduced).labels(budget)


def judge(moves: Moves, machine: Machine, rules: Rules, limits: Limits) -> Judged:
    """See `labels.judge`."""
    needs = Needs(moves, rules, limits)
    reduced = reduce(moves, machine, rules, limits, needs)
    count = np.where(reduced.alive, reduced.count, -1)
    first, second, sync, _ = needs.nexts.tolist()
    return Judged(reduced.least_weight, (first, second, sync), count)


@dataclass(eq=False)
class _Batch:
    """Candidate labels of one position, as columns; see `LabelStore`."""

    label: Integers
    move: Integers
    config: Integers
    level: Integers
    needed: Integers

    def take(self, mask: Mask | Integers) -> _Batch:
        return _Batch(
            self.label[mask], self.move[mask], self.config[mask], self.level[mask],
            self.needed[mask],
        )  # fmt: skip


def _nothing() -> _Batch:
    none = np.zeros(0, dtype=np.int64)
    return _Batch(none, none, none, none, none)


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
    power = count * machine.speed[moves.config_class][:, None]
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
        if machine.granule:
            whole = -(-found // machine.granule) * machine.granule
            found = np.where(found > machine.granule, whole, found)
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
    return np.where(regular, _all_reduce(machine, size, ranks, level, groups), 0.0)


def _all_reduce(
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


class _Run:
    def __init__(
        self,
        moves: Moves,
        machine: Machine,
        rules: Rules,
        limits: Limits,
        needs: Needs,
        reduced: Reduced,
    ) -> None:
        self.moves, self.machine, self.rules, self.limits = moves, machine, rules, limits
        self.reduced, self.nexts = reduced, needs.nexts
        self.needs = Needs(moves, rules, limits)  # counts again, without noting what is beyond
        self.num_classes, self.levels = machine.groups.shape
        self.power = float((machine.total * machine.speed).sum())
        self.residue = (
            machine.groups[:, :-1].max(axis=1)
            if self.levels > 1
            else np.ones(self.num_classes, dtype=np.int64)
        )
        n = moves.num_atoms
        self.begin, self.finish = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
        self.finish[n] = 1
        self.store = empty_store(moves, machine)
        self.flies = watches_flying(moves, rules)
        self.last_pin = last_pin(moves)
        self.size = 1
        self.compared = 0
        self.most_compared = 2**62

    def labels(self, budget: int) -> tuple[LabelStore, Floats, bool]:
        looked, self.most_compared = 0, 4 * SCANNED * budget // (self.num_classes + 3)
        first = np.repeat(np.arange(self.moves.num_atoms), np.diff(self.moves.start))
        used = np.bincount(first[self.reduced.alive.any(axis=0)], minlength=len(self.begin))
        for position in range(self.moves.num_atoms - 1, -1, -1):
            self.begin[position] = self.finish[position] = self.size
            if not used[position]:
                continue
            batch = self._candidates(position)
            looked += len(batch.label) * (1 + self.num_classes // 4)
            self._extend(position, batch)
            self.finish[position] = self.size
            looked += self.compared * (self.num_classes + 3) // (4 * SCANNED)
            self.compared = 0
            if looked > budget:
                break
        self._shrink()
        return self.store, self.nexts, bool(looked <= budget)

    def _candidates(self, i: int) -> _Batch:
        """Stage, configuration, label and link level, with the replicas they need."""
        moves, rules = self.moves, self.rules
        span = slice(int(moves.start[i]), int(moves.start[i + 1]))
        config, move = np.nonzero(self.reduced.alive[:, span])
        move = move + span.start
        last = moves.last[move]
        alive = self.begin[last] < self.finish[last]
        if not alive.any():
            return _nothing()
        config, move = config[alive], move[alive]
        levels = np.tile(np.arange(self.levels), len(move))
        config, move = np.repeat(config, self.levels), np.repeat(move, self.levels)
        real = (levels == 0) | (moves.last[move] < moves.num_atoms)
        config, move, levels = config[real], move[real], levels[real]
        needed = self.needs.counts(moves.offset[i], config, move, levels)
        most = np.minimum(rules.max_replicas, self.machine.total[moves.config_class[config]])
        inner = moves.last[move] < moves.num_atoms
        possible = (needed <= most) & ~(inner & beyond(self.machine, levels, needed))
        config, move, levels, needed = (
            column[possible] for column in (config, move, levels, needed)
        )
        return self._with_labels(i, config, move, levels, needed)

    def _with_labels(
        self, i: int, config: Integers, move: Integers, levels: Integers, needed: Integers
    ) -> _Batch:
        """Every pair of a stage and a label behind it, memory seen to.

        In the order the kernel looks at them: configuration, stage, label, level.
        """
        moves, rules, store = self.moves, self.rules, self.store
        last = moves.last[move]
        number = self.finish[last] - self.begin[last]
        row = np.repeat(np.arange(len(move)), number)
        within = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        label = self.begin[last][row] + within
        batch = _Batch(label, move[row], config[row], levels[row], needed[row])
        stage = store.stages[label] + 1
        keep = np.ones(len(row), dtype=np.bool_)
        front = self._front(batch.label, batch.move)
        wanted = moves.stage_number[batch.move]
        keep &= (front >= 0) & ((wanted == 0) | (wanted == front))
        keep &= (front == 0) | ((front == 1) == (i == 0))
        if rules.num_stages:
            keep &= stage <= rules.num_stages
            keep &= (stage == rules.num_stages) == (i == 0)
        if rules.max_stages:
            keep &= stage <= rules.max_stages - (i > 0)
        keep &= ~(
            store.weight[label] + moves.weight[batch.config, batch.move]
            + self.reduced.front_weight[i]
            > self.limits.weight + _lost(self.limits.quantum, stage)
        )  # fmt: skip
        most = self._most(batch)
        keep &= batch.needed <= most
        batch, most, stage = batch.take(keep), most[keep], stage[keep]
        keep = self._promising(i, batch, stage)
        batch, most = batch.take(keep), most[keep]
        batch = self._within_memory(i, batch, most)
        order = np.lexsort((batch.level, batch.label, batch.move, batch.config))
        return batch.take(order)

    def _front(self, label: Integers, move: Integers) -> Integers:
        """Number of a stage from the front; 0 where it is not known, -1 where there is none."""
        behind = self.store.front[label]
        left = np.where(behind > 1, behind - 1, -1)
        front: Integers = np.where(behind > 0, left, self.moves.stage_number[move])
        return front

    def _promising(self, i: int, batch: _Batch, stage: Integers) -> Mask:
        """Whether what is in front of a stage of the fewest replicas can still be had."""
        moves, store, reduced = self.moves, self.store, self.reduced
        link = moves.weight_link[batch.level, moves.last[batch.move]]
        weight = store.weight[batch.label] + (moves.weight[batch.config, batch.move] + link)
        left = self._left(store.used[batch.label])
        spare = left - batch.needed * self.machine.speed[moves.config_class[batch.config]]
        limit = self.limits.weight + _lost(self.limits.quantum, stage)
        keep: Mask = ~(weight + reduced.front_weight[i] > limit)
        keep &= ~(reduced.front_power[i] > spare + left * 1e-9 + 1e-9)
        if reduced.price > 0:
            slack = self.power * (1 + 1e-9) + 1e-9
            mixed = weight + reduced.price * (self.power - spare) + reduced.front_mixed[i]
            keep &= ~(mixed > limit + reduced.price * slack)
        return keep

    def _left(self, used: Integers) -> Floats:
        """Devices not used up, in those of the slowest class."""
        left = np.full(len(used), self.power)
        for k in range(self.num_classes):
            left = left - used[:, k] * self.machine.speed[k]
        return left

    def _most(self, batch: _Batch) -> Integers:
        classes = self.moves.config_class[batch.config]
        free = self.machine.total[classes] - self.store.used[batch.label, classes]
        limit = min(self.rules.max_replicas, self.rules.num_microbatches)
        left = self.rules.max_ranks - self.store.ranks[batch.label]
        most: Integers = np.minimum(np.minimum(free, limit), left)
        return most

    def _within_memory(self, i: int, batch: _Batch, most: Integers) -> _Batch:
        """Raise replicas until the stage fits; drop what never does."""
        behind = self.store.flying[batch.label]
        count = raised(
            self.moves, self.rules, i, batch.config, batch.move, behind, batch.needed, most
        )
        batch.needed = count
        inner = self.moves.last[batch.move] < self.moves.num_atoms
        return batch.take((count > 0) & ~(inner & beyond(self.machine, batch.level, count)))

    def _extend(self, i: int, batch: _Batch) -> None:
        """Place every candidate, with more replicas too where that changes a level; keep the best.

        In the order the kernel meets them: candidate, number of replicas, place.
        """
        if not len(batch.label):
            return
        most = self._most(batch)
        position, steps, counts = self._within_group(batch, most)
        candidates, all_steps, all_counts = [position], [steps], [counts]
        least = np.full(len(batch.label), 2**60, dtype=np.int64)
        last = np.append(position[1:] != position[:-1], True)
        while self.levels > 1 or self.flies:
            *_, good = self._ends(batch.take(position), counts)
            placed = good.reshape(-1, self.levels).any(axis=1)
            left_behind = counts * (1 - (-self.store.flying[batch.label[position]] // counts))
            np.minimum.at(least, position[placed], left_behind[placed])
            position, steps, counts = position[last], steps[last], counts[last]
            counts = self._next_counts(batch.take(position), counts, least[position])
            keep = (counts > 0) & (counts <= most[position])
            inner = self.moves.last[batch.move[position]] < self.moves.num_atoms
            keep &= ~(inner & beyond(self.machine, batch.level[position], counts))
            if not keep.any():
                break
            position, steps, counts = position[keep], steps[keep] + 1, counts[keep]
            last = np.ones(len(position), dtype=np.bool_)
            candidates.append(position)
            all_steps.append(steps)
            all_counts.append(counts)
        order = np.lexsort((np.concatenate(all_steps), np.concatenate(candidates)))
        chosen = np.concatenate(candidates)[order]
        self._keep_best(*self._placed(i, batch.take(chosen), np.concatenate(all_counts)[order]))

    def _within_group(self, batch: _Batch, most: Integers) -> tuple[Integers, Integers, Integers]:
        """Candidate, step and replicas: every number from the fewest on that fits a group."""
        number = np.ones(len(batch.label), dtype=np.int64)
        if self.levels > 1:
            size = self.machine.groups[self.moves.config_class[batch.config], 0]
            number = np.maximum(np.minimum(size - 1, most) - batch.needed + 1, 1)
        position = np.repeat(np.arange(len(number)), number)
        step = np.arange(len(position)) - np.repeat(np.cumsum(number) - number, number)
        return position, step, batch.needed[position] + step

    def _after(self, label: Integers, count: Integers) -> Integers:
        """Micro-batches in flight from each candidate on, 0 where they do not matter."""
        if not self.flies:
            return np.zeros_like(count)
        after: Integers = count * (1 - (-self.store.flying[label] // count))
        return after

    def _next_counts(self, batch: _Batch, count: Integers, least: Integers) -> Integers:
        """`labels_kernel._next_count` for many."""
        classes = self.moves.config_class[batch.config]
        total, groups = self.machine.total[classes], self.machine.groups[classes]
        at_end = self.store.used[batch.label, classes] == 0
        flying = self.store.flying[batch.label]
        result = np.full(len(count), -1, dtype=np.int64)
        undecided = np.ones(len(count), dtype=np.bool_)
        inner = np.ones(len(count), dtype=np.int64)

        def following(low: Integers) -> Integers:
            whole: Integers = -(-low // inner) * inner
            partial = low + (total - low) % inner
            return np.where(at_end, np.minimum(whole, partial), whole)

        for level in range(self.levels - 1):
            here = undecided & (count < groups[:, level])
            result[here] = following(count + 1)[here]
            undecided &= ~here
            inner = np.where(undecided, np.maximum(inner, groups[:, level]), inner)
        low = count + 1
        while undecided.any():
            number = following(low)
            undecided &= number + flying < least
            turns = -(-flying // number)
            good = undecided & (number * (1 + turns) < least)
            result[good] = number[good]
            undecided &= ~good & (turns > 1)
            low = np.maximum(number + 1, -(-flying // np.maximum(turns - 1, 1)))
        return result

    def _ends(self, batch: _Batch, count: Integers) -> tuple[Integers, ...]:
        """Candidates once for each place, as columns: what they are, where they end, the level
        of the cut behind, and whether that place is one.
        """
        moves, machine = self.moves, self.machine
        pads = np.tile(np.arange(self.levels), len(count))
        label, move, config, level, count = (
            np.repeat(column, self.levels)
            for column in (batch.label, batch.move, batch.config, batch.level, count)
        )
        classes = moves.config_class[config]
        groups, total = machine.groups[classes], machine.total[classes]
        free = total - self.store.used[label, classes]
        border = groups[np.arange(len(pads)), np.maximum(pads - 1, 0)]
        end = self._place(groups, total, np.where(pads > 0, free // border * border, free), count)
        good = (end >= 0) & ((pads == 0) | (end != np.roll(end, 1)))
        cut = self._cut_levels(groups, classes, label, end, free)
        inner = moves.last[move] < moves.num_atoms
        cut = np.where(inner, cut, 0)
        good &= ~inner | (cut == level)
        return label, move, config, level, count, end, cut, good

    def _placed(self, i: int, batch: _Batch, count: Integers) -> list[NDArray[Any]]:
        """Columns of the labels that can be made of these candidates.

        Each is placed as late as it can be, and behind each group border before that.
        """
        moves, machine, store, limits = self.moves, self.machine, self.store, self.limits
        label, move, config, _, count, end, cut, good = self._ends(batch, count)
        classes = moves.config_class[config]
        groups, total = machine.groups[classes], machine.total[classes]
        sync = np.zeros(len(count))
        shared = good & (count > 1)
        if shared.any():
            group = self._level_of(groups[shared], (end - count)[shared], end[shared] - 1)
            sync[shared] = (
                _all_reduce(
                    machine, moves.gradients[move[shared]], count[shared], group, groups[shared]
                )
                * self.rules.sync_scale
                - moves.lead[i]
            )
        late = shared & (sync > limits.sync) & (sync > 0)
        if late.any():
            self.nexts[2] = min(self.nexts[2], float(sync[late].min()))
            good &= ~late
        weight = store.weight[label] + (
            moves.weight[config, move] + moves.weight_link[cut, moves.last[move]]
        )
        stages = store.stages[label] + 1
        limit = limits.weight + _lost(limits.quantum, stages)
        good &= ~(weight + self.reduced.front_weight[i] > limit)
        used = store.used[label].copy()
        used[np.arange(len(count)), classes] = total - (end - count)
        left = self._left(used)
        good &= self.reduced.front_power[i] <= left * (1 + 1e-9) + 1e-9
        price = self.reduced.price
        if price > 0:
            slack = self.power * (1 + 1e-9) + 1e-9
            mixed = weight + price * (self.power - left) + self.reduced.front_mixed[i]
            good &= ~(mixed > limit + price * slack)
        index = np.flatnonzero(good)
        front = self._front(label, move)
        key = self._keys(used, classes, stages, front)
        flying, ranks = self._after(label, count), store.ranks[label] + count
        columns: list[NDArray[Any]] = [
            used, flying, stages, ranks, weight, key, label, move, config, count, end, front,
        ]  # fmt: skip
        return [column[index] for column in columns]

    def _keys(
        self, used: Integers, classes: Integers, stages: Integers, front: Integers
    ) -> Integers:
        """Labels with different keys are never compared."""
        key = np.zeros(len(classes), dtype=np.int64)
        for k in range(self.num_classes):
            residue = self.residue[k]
            key = key * residue + (self.machine.total[k] - used[:, k]) % residue
        if self.num_classes > 1 and self.levels > 1:
            key = key * self.num_classes + classes
        if self.rules.num_stages:
            key = key * (self.rules.num_stages + 1) + stages
        if self.last_pin:
            key = key * (self.last_pin + 1) + front
        return key

    def _place(
        self, groups: Integers, total: Integers, free: Integers, count: Integers
    ) -> Integers:
        """`DeviceClass.place` for many: every round moves some down to a group's begin."""
        end = free.copy()
        bad = np.zeros(len(end), dtype=np.bool_)
        while True:
            before = end.copy()
            searching = ~bad
            for level in range(self.levels - 1):
                size = groups[:, level]
                small = searching & (count <= size)
                apart = small & ((end - 1) // size != (end - count) // size)
                end = np.where(apart, end // size * size, end)
                searching = searching & ~small
                tail = (end == total) & ((end - count) % size == 0)
                whole = searching & ~tail
                end = np.where(whole & (end % size != 0), end // size * size, end)
                bad |= whole & (count % size != 0)
            bad |= end < count
            if (bad | (end == before)).all():
                return np.where(bad, -1, end)

    def _level_of(self, groups: Integers, first: Integers, last: Integers) -> Integers:
        level = np.full(len(first), self.levels - 1, dtype=np.int64)
        for index in range(self.levels - 2, -1, -1):
            size = groups[:, index]
            level = np.where(first // size == last // size, index, level)
        return level

    def _cut_levels(
        self, groups: Integers, classes: Integers, label: Integers, end: Integers, free: Integers
    ) -> Integers:
        """The level of the link from the stage placed to the one behind it."""
        level = self._level_of(groups, end - 1, free)
        if self.num_classes > 1:
            other = self.moves.config_class[np.maximum(self.store.config[label], 0)]
            level = np.where(other == classes, level, self.machine.between[classes, other])
        return level

    def _keep_best(
        self,
        used: Integers,
        flying: Integers,
        stages: Integers,
        ranks: Integers,
        weight: Floats,
        key: Integers,
        *rest: Integers,
    ) -> None:
        """Add the candidates no other one is at least as good as; ties to the first."""
        if not len(key):
            return
        quantum = self.limits.quantum
        bucket = weight
        if quantum > 0:
            bucket = np.zeros_like(weight) if quantum == np.inf else np.floor(weight / quantum)
        respects: list[Integers | Floats] = []
        respects.extend(used.T)
        if self.flies:
            respects.append(flying)
        if self.rules.max_stages:
            respects.append(stages)
        if self.rules.count_ranks:
            respects.append(ranks)
        respects.append(bucket)
        order = np.lexsort((np.arange(len(key)), weight, *reversed(respects), key))
        chosen, compared = _undominated(key, respects, order, self.most_compared)
        self.compared += compared
        chosen.sort()
        kept = np.array(chosen, dtype=np.int64)
        parent, move, config, count, end, front = (column[kept] for column in rest)
        self._append(
            used[kept], flying[kept], stages[kept], ranks[kept], weight[kept], bucket[kept],
            key[kept], parent, move, config, count, end, front,
        )  # fmt: skip

    def _append(self, *columns: NDArray[np.int64] | NDArray[np.float64]) -> None:
        """Grow the store; its columns keep room for more."""
        names = COLUMNS
        size = self.size + len(columns[0])
        for name, column in zip(names, columns, strict=True):
            held = getattr(self.store, name)
            if size > len(held):
                grown = np.zeros((2 * size, *held.shape[1:]), dtype=held.dtype)
                grown[: self.size] = held[: self.size]
                held = grown
                setattr(self.store, name, held)
            held[self.size : size] = column
        self.size = size

    def _shrink(self) -> None:
        for name in COLUMNS:
            setattr(self.store, name, getattr(self.store, name)[: self.size])
        self.store.begin, self.store.finish = self.begin, self.finish


def _undominated(
    key: Integers, respects: list[Integers | Floats], order: Integers, most: int
) -> tuple[list[int], int]:
    """Of candidates sorted by key, then by every respect, those no earlier one beats.

    In that order nothing can be dominated by what comes later. Also how many were compared; it
    ends early, with some left out, beyond ``most``.
    """
    table = np.stack([np.asarray(column, dtype=np.float64) for column in respects])[:, order]
    keys = key[order]
    chosen: list[int] = []
    compared = 0
    starts = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    ends = np.append(starts[1:], len(keys))
    for start, end in zip(starts, ends, strict=True):
        alive = np.arange(start, end)
        while len(alive) and compared <= most:
            head = alive[0]
            chosen.append(int(order[head]))
            alive = alive[1:]
            compared += len(alive)
            alive = alive[(table[:, alive] < table[:, head : head + 1]).any(axis=0)]
    return chosen, compared


def _lost(quantum: float, stages: Integers) -> Floats:
    """By how much labels of so many stages may be heavier than ones that they stand for."""
    if quantum == 0:
        return np.zeros(len(stages))
    return np.multiply(stages, quantum, dtype=np.float64)
