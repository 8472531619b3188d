"""The label search without numba: the same labels, a position at a time with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arc_reduction_numpy import Needs, Reduced, all_reduce, beyond, raised, reduce
from .label_setting import (
    COLUMNS,
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
        is_last = self.store.used[batch.label, classes] == 0
        flying = self.store.flying[batch.label]
        inner = np.ones(len(count), dtype=np.int64)
        beyond_groups = np.ones(len(count), dtype=np.bool_)
        for level in range(self.levels - 1):
            beyond_groups &= count >= groups[:, level]
            inner = np.where(beyond_groups, np.maximum(inner, groups[:, level]), inner)
        further = count + 1 + np.minimum(-count % inner, (total - count) % inner)
        result = np.where(is_last, further, (count // inner + 1) * inner)
        result[beyond_groups] = -1
        undecided = is_last | beyond_groups
        step = np.where(is_last, 1, inner)
        low = count + 1
        while undecided.any():
            number = -(-low // step) * step
            undecided &= ((result < 0) | (number < result)) & (number + flying < least)
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
        used = self.store.used[label, classes]
        free = total - used
        border = groups[np.arange(len(pads)), np.maximum(pads - 1, 0)]
        start_at = np.where(pads > 0, free // border * border, free)
        end = self._place(groups, used == 0, start_at, count)
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
                all_reduce(
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

    def _place(self, groups: Integers, is_last: Mask, free: Integers, count: Integers) -> Integers:
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
                whole = searching & ~is_last
                end = np.where(searching & is_last, end - (end - count) % size, end)
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
