"""Least bound on the simulated step behind every cut, for stages merged by what is left of them.

A backward dynamic program over `StepState`s: what a stage needs to know of those behind it is which
devices they leave, how many micro-batches they keep in flight, and where the next one is. For each
state and each position i at which its stages may begin, three numbers are kept, each the least of
all ways to get there by itself:

    inner(i)   Up + Down + inner(i) bounds the step, with Up and Down the way of a micro-batch
               through what is in front, and back (`planner/simulator/step_bound.py`)
    summed(i)  Up + summed(i) does, with the summing of gradients behind
    behind(i)  round trip of a micro-batch through all these stages

Transition, for a stage of layers i .. j in front of a state's position j:

    behind(i) = t + c + behind(j)
    inner(i)  = max(t + c + inner(j), the stage's own turns and waits, its channels)

Both are monotone, so the least of each gives a bound on all plans. What a bound leaves out is that
one plan may not have the least of all three, and intervals that end at an inner stage.
Complexity: O(states x replicas x arcs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...core.profile.backward_parts import has_parts, layer_parts_s
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.chain import Mask
from ..cost.device_classes import Devices
from ..cost.sharing import SharedBytes, held_share, saves_memory
from .arcs import SearchSpace, StageArcs
from .device_pool import Floats, Integers, time_protocols
from .relaxation_kernel import fits_memory

MAX_LOOKED = 6_000_000
"""Arcs looked at in all before a graph is given up as too large: 0.2 s."""

PER_STEP = 3_000
"""What a step costs beside its arcs, in arcs."""


class StepState(NamedTuple):
    """The stages behind a cut, as far as those in front of it can tell.

    Attributes:
        free: Devices of each class in front of the last one used.
        ahead: Micro-batches in flight at the first of the stages, over all its replicas.
        device_class: Class of the first stage; -1 if there is none.
        begin: Rank of its first device.
        replicas: Its replicas.
        last_replicas: Those of the last stage, where the schedule turns around there.
        stages: Their number, where that is limited.
    """

    free: tuple[int, ...]
    ahead: int = 0
    device_class: int = -1
    begin: int = 0
    replicas: int = 0
    last_replicas: int = 0
    stages: int = 0


def list_places(
    devices: Devices, state: StepState, number: int, replicas: int
) -> Iterator[tuple[int, int]]:
    """Yield where a stage on one class may end in front of a state, and the level of the cut.

    Of the ends with the same level, only the last. The last stage of a class may also leave the
    rest of a group idle: whether those in front of it begin inside a group depends on that.
    """
    entry, free = devices.classes[number], state.free[number]
    is_last, seen = free == len(entry), set()
    for size in (1, *entry.group_sizes[:-1]):
        end = entry.place(free // size * size, replicas, is_last=is_last)
        if end < replicas:
            continue
        level = 0
        if state.device_class == number:
            level = entry.level_of(end - 1, state.begin)
        elif state.device_class >= 0:
            level = devices.level_between(number, state.device_class)
        key = end if is_last else level
        if key not in seen:
            seen.add(key)
            yield end, level


class StageStep(NamedTuple):
    """A stage put in front of a state: its devices, and the level of the cut behind it."""

    device_class: int
    replicas: int
    end: int
    level: int
    behind: StepState


class ArcColumns(NamedTuple):
    """Arcs of one class, sorted by first position."""

    first: Integers
    last: Integers
    recompute: Integers
    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    room: Integers
    saved: Integers
    buffer: Integers
    gradients: Integers
    begin: Integers

    def take(self, rows: Integers | Mask) -> ArcColumns:
        """Return some of the arcs; ``begin`` stays that of all."""
        columns = {name: getattr(self, name)[rows] for name in self._fields[:-1]}
        return self._replace(**columns)


@dataclass
class StateBounds:
    """The least bounds of a state by position, and the steps that lead to them."""

    inner_s: Floats
    summed_s: Floats
    behind_s: Floats
    steps: list[StageStep] = field(default_factory=list)


class TooLarge(Exception):
    """The graph has more states and steps than it may take time to look at."""


class StepGraph:
    """All states of one search space, for plans with a simulated step below ``limit_s``."""

    def __init__(self, space: SearchSpace, limit_s: float, max_looked: int = MAX_LOOKED) -> None:
        self.space, self.limit_s, self.looked = space, limit_s, max_looked
        options = space.options
        self.schedule = options.schedule
        self.splits = self.schedule in SPLIT_BACKWARD
        self.has_equal_replicas = self.schedule not in ("1f1b", "gpipe")
        self.arcs: StageArcs = space.arcs("gpipe")
        self.pool, self.rules = space.pool(), space.rules("gpipe")
        self.classes = space.devices.classes
        self.there_s, self.back_s = space.link_times_s()
        self.num_atoms = space.tables.num_atoms
        self.limits_stages = bool(options.num_stages or options.max_stages)
        self.most_stages = options.num_stages or options.max_stages or self.num_atoms
        self.bounds: dict[StepState, StateBounds] = {}
        self._columns: dict[tuple[int, int], ArcColumns] = {}
        self.root = StepState(tuple(len(entry) for entry in self.classes))
        if self._least_steps() * PER_STEP > max_looked:
            raise TooLarge
        self._fill()

    # --- Columns ------------------------------------------------------------------------------

    def columns(self, device_class: int, replicas: int) -> ArcColumns:
        """Return the arcs of one class that one replica can work off below the limit."""
        key = device_class, replicas
        if key not in self._columns:
            arcs, firsts = self.arcs, self.arcs.first_positions()
            up, down = self.front_s
            share = -(-self.rules.num_microbatches // replicas)
            backward_s, weights_s = self._backwards
            work_s = share * (arcs.first_unit + backward_s)
            chosen = np.flatnonzero(
                (arcs.device_class == device_class)
                & (arcs.room >= 0)
                & (up[firsts] + work_s + (0.0 if self.splits else down[firsts]) < self.limit_s)
            )
            first, last = firsts[chosen], arcs.last[chosen]
            shared = SharedBytes(arcs.divided[chosen], arcs.whole[chosen], 0, 0)
            sent = arcs.once[chosen] + share * arcs.each_round[chosen]
            self._columns[key] = ArcColumns(
                first, last, arcs.recompute[chosen], arcs.first_unit[chosen],
                backward_s[chosen], weights_s[chosen],
                arcs.room[chosen] - np.minimum(shared.divided, held_share(shared, replicas)),
                arcs.saved[chosen], arcs.arriving[first] + arcs.returning[last],
                np.where(saves_memory(shared, replicas), sent, arcs.gradients[chosen]),
                np.searchsorted(first, np.arange(self.num_atoms + 2)),
            )  # fmt: skip
        return self._columns[key]

    @cached_property
    def _parts_s(self) -> Floats | None:
        """Return, in front of each position, both parts of backwards and forwards; None unknown."""
        tables = self.space.tables
        if not (self.splits and has_parts(tables.profile)):
            return None
        rows = [(*layer_parts_s(one), one.forward.median_s) for one in tables.profile.layers]
        front: Floats = np.concatenate((np.zeros((1, 3)), np.cumsum(rows, axis=0)))
        _, positions = tables.layout(range(self.num_atoms + 1))
        front = front[list(positions)].T
        if loss := tables.profile.loss:
            front[0, -1] += loss.backward.median_s
        return front

    @cached_property
    def _backwards(self) -> tuple[Floats, Floats]:
        """Return, per arc, its backward and the part of it for weights, 0 where it is not split."""
        arcs, parts = self.arcs, self._parts_s
        if parts is None:
            return arcs.second_unit, arcs.second_unit * (0.5 if self.splits else 0.0)
        inputs_s, weights_s, again_s = parts[:, arcs.last] - parts[:, arcs.first_positions()]
        speeds = np.array([entry.speed for entry in self.classes])[arcs.device_class]
        return (inputs_s + weights_s + again_s * arcs.recompute) / speeds, weights_s / speeds

    @cached_property
    def front_s(self) -> tuple[Floats, Floats]:
        """Return the least forward and backward time of all layers in front of each position."""
        tables, fastest = self.space.tables, self.space.devices.fastest
        up, down = tables.front_forward_s / fastest, tables.front_backward_s / fastest
        if self._parts_s is not None:
            return up, self._parts_s[0] / fastest
        return up, down / 2 if self.splits else down

    def microbatches(self, replicas: int) -> tuple[int, int]:
        """Return micro-batches and replicas as the bounds count them.

        Equal replicas are pipelines of their own, each with its share.
        """
        m = self.rules.num_microbatches
        return (-(-m // replicas), 1) if self.has_equal_replicas else (m, replicas)

    def depth(self, replicas: int, ahead: int) -> int:
        """Return the forwards of a stage in front of its first backward."""
        m, count = self.microbatches(replicas)
        share = -(-m // count)
        return share if self.schedule == "gpipe" else min(share, 1 + -(-ahead // count))

    def _least_steps(self) -> int:
        """Estimate the steps from below: numbers of devices left, times replicas."""
        states, most = 1, min(max(self.root.free), self.rules.max_replicas)
        for count in self.root.free:
            states *= count + 1
        if self.has_equal_replicas:
            return states * len(self.classes)
        # Micro-batches in flight tell states with equally many devices left apart.
        return states * most // 2 * (3 if most > 1 else 1) * len(self.classes)

    # --- The dynamic program ------------------------------------------------------------------

    def _fill(self) -> None:
        end, free = self.num_atoms, sum(self.root.free)
        bounds = self._new_bounds()
        for column in (bounds.inner_s, bounds.summed_s, bounds.behind_s):
            column[end] = 0.0
        waiting: dict[int, dict[StepState, StateBounds]] = defaultdict(dict)
        waiting[free][self.root] = bounds
        # Every stage takes devices: a state is complete when all with more of them left are.
        for left in range(free, -1, -1):
            for state, found in waiting.pop(left, {}).items():
                self._prune(state, found)
                if not np.isfinite(found.inner_s).any():
                    continue
                self.bounds[state] = found
                if np.isfinite(found.inner_s[1:]).any():
                    for step in self._steps(state):
                        self._extend(step, found, waiting)

    def _new_bounds(self) -> StateBounds:
        inner, summed, behind = np.full((3, self.num_atoms + 1), np.inf)
        return StateBounds(inner, summed, behind)

    def _prune(self, state: StepState, found: StateBounds) -> None:
        """Forget the positions from which no plan below the limit leads to the front."""
        up, down = self.front_s
        least = np.maximum(up + down + found.inner_s, up + found.summed_s)
        speeds = [entry.speed for entry in self.classes]
        left = sum(count * speed for count, speed in zip(state.free, speeds, strict=True))
        # What is left of the devices has to do all the work in front.
        tables, m = self.space.tables, self.rules.num_microbatches
        backward_s = tables.front_backward_s
        if self._parts_s is not None:
            backward_s = self._parts_s[0] + self._parts_s[1]
        work = tables.front_forward_s[1:] + backward_s[1:]
        least[1:] = np.maximum(least[1:], m * work / left if left else np.inf)
        if self.limits_stages and state.stages >= self.most_stages:
            least[1:] = np.inf
        if self.space.options.num_stages and state.stages < self.space.options.num_stages:
            least[0] = np.inf
        hopeless = ~(least < self.limit_s)
        for column in (found.inner_s, found.summed_s, found.behind_s):
            column[hopeless] = np.inf

    def _steps(self, state: StepState) -> Iterator[StageStep]:
        """Yield the stages that may be in front of a state, as far as devices go."""
        rules = self.rules
        for number, free in enumerate(state.free):
            most = min(free, rules.max_replicas, rules.num_microbatches)
            counts = range(rules.min_replicas, most + 1)
            if self.has_equal_replicas and state.replicas:
                counts = range(state.replicas, min(state.replicas, most) + 1)
            for replicas in counts:
                for end, level in list_places(self.space.devices, state, number, replicas):
                    yield StageStep(number, replicas, end, level, state)

    def state_of(self, step: StageStep) -> StepState:
        """Return the state that a step leads to."""
        behind, number, replicas = step.behind, step.device_class, step.replicas
        free = list(behind.free)
        free[number] = step.end - replicas
        m, count = self.microbatches(replicas)
        ahead, last = 0, 0
        if self.schedule == "gpipe":
            last = behind.last_replicas or replicas
        else:
            ahead = min(count * (1 + -(-behind.ahead // count)), m)
        return StepState(
            tuple(free), ahead, number, step.end - replicas, replicas, last,
            behind.stages + 1 if self.limits_stages else 0,
        )  # fmt: skip

    def _extend(
        self, step: StageStep, found: StateBounds,
        waiting: dict[int, dict[StepState, StateBounds]],
    ) -> None:  # fmt: skip
        columns = self.columns(step.device_class, step.replicas)
        if not len(columns.first):
            return
        self.looked -= PER_STEP + len(columns.first)
        if self.looked < 0:
            raise TooLarge
        # Most positions were pruned, and what ends there leads nowhere.
        columns = columns.take(np.flatnonzero(np.isfinite(found.inner_s)[columns.last]))
        if not len(columns.first):
            return
        bounds = self.bound_arcs(step, columns, found)
        state = self.state_of(step)
        target = waiting[sum(state.free)].setdefault(state, self._new_bounds())
        starts = np.flatnonzero(np.diff(columns.first, prepend=-1))
        firsts = columns.first[starts]
        for column, values in zip(
            (target.inner_s, target.summed_s, target.behind_s), bounds, strict=True
        ):
            column[firsts] = np.minimum(column[firsts], np.minimum.reduceat(values, starts))
        target.steps.append(step)

    def links_s(self, step: StageStep, last: Integers) -> tuple[Floats, Floats]:
        """Return the time to send over the cut behind a stage, forward and back."""
        if step.behind.device_class < 0:
            nothing = np.zeros(len(last))
            return nothing, nothing
        return self.there_s[step.level, last], self.back_s[step.level, last]

    def sync_s(self, step: StageStep, gradients: Integers) -> Floats:
        """Return the time to sum gradients over a stage's replicas."""
        if step.replicas == 1:
            return np.zeros(len(gradients))
        entry = self.classes[step.device_class]
        level = entry.level_of(step.end - step.replicas, step.end - 1)
        return _all_reduce_s(
            gradients, step.replicas, level, self.pool.protocols, self.pool.bandwidth,
            entry.group_sizes,
        )  # fmt: skip

    def fits(self, step: StageStep, columns: ArcColumns) -> Mask:
        """Return True for the arcs that fit the devices."""
        behind = step.behind.ahead * (step.replicas if self.has_equal_replicas else 1)
        # Written for numbers, in compiled loops; it takes columns as well.
        check: Any = fits_memory
        found: Mask = check(
            step.replicas, behind, columns.room, columns.saved, columns.buffer, self.rules
        )
        return found

    def bound_arcs(
        self, step: StageStep, columns: ArcColumns, found: StateBounds
    ) -> tuple[Floats, Floats, Floats]:
        """Return inner, summed and behind of a step by arc; infinite where it cannot be."""
        there, back = self.links_s(step, columns.last)
        sync = self.sync_s(step, columns.gradients)
        gradient_s = columns.backward_s - columns.weights_s
        work = columns.forward_s + gradient_s
        behind = found.behind_s[columns.last] + there + back
        own = self._flow_shop if self.schedule == "gpipe" else self._turns
        inner, summed = own(step, columns, gradient_s, behind, there, back)
        inner = np.maximum(inner, work + there + back + found.inner_s[columns.last])
        summed = np.maximum(summed + sync, columns.forward_s + there + found.summed_s[columns.last])
        is_out = ~self.fits(step, columns) | ~np.isfinite(inner)
        trip = work + behind
        for values in (inner, summed, trip):
            values[is_out] = np.inf
        return inner, summed, trip

    def _turns(
        self, step: StageStep, columns: ArcColumns, gradient_s: Floats, behind: Floats,
        there: Floats, back: Floats,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        m, count = self.microbatches(step.replicas)
        share, next_share = -(-m // count), self._next_share(step)
        depth = self.depth(step.replicas, step.behind.ahead)
        forward_s, work = columns.forward_s, columns.forward_s + gradient_s
        lead, tail = (depth - 1) * forward_s, (depth - 1) * gradient_s
        waited = np.maximum(lead, behind)
        if share > depth:
            turned = waited + (share - depth + 1) * work
            inner, summed = turned + np.maximum(tail, behind), turned + tail
        else:
            summed = waited + work + tail
            inner = np.maximum(summed, lead + work + behind)
        # the interval from here to the last stage
        span = depth * count
        turns = (m - 1) // span
        around = (turns + 1) * (work + behind) + ((m - 1 - turns * span) // count) * gradient_s
        sent = work + behind + np.maximum((share - 1) * there, (next_share - 1) * back)
        if self.splits:
            done = np.maximum(depth * forward_s, forward_s + behind) - depth * forward_s
            done += share * (forward_s + columns.backward_s)
            most = sum(step.behind.free) // step.replicas  # stages in front, this one included
            inner = np.maximum(inner, done - min(share, most) * columns.weights_s)
            summed = np.maximum(summed, done)
        return np.maximum(np.maximum(inner, around), sent), np.maximum(summed, around)

    def _flow_shop(
        self, step: StageStep, columns: ArcColumns, gradient_s: Floats, behind: Floats,
        there: Floats, back: Floats,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        m, replicas = self.rules.num_microbatches, step.replicas
        last = step.behind.last_replicas or replicas
        share = -(-m // replicas)
        returned = (m - last) // replicas + 1
        forth = columns.forward_s + gradient_s + behind
        forth = forth + (share - 1) * np.maximum(columns.forward_s, there)
        back_again = (returned - 1) * gradient_s
        if step.behind.replicas:
            others = (m - last) // step.behind.replicas + 1
            back_again = np.maximum(back_again, (others - 1) * back)
        return forth + back_again, forth + (returned - 1) * gradient_s

    def _next_share(self, step: StageStep) -> int:
        if not step.behind.replicas:
            return 1
        m, count = self.microbatches(step.behind.replicas)
        return -(-m // count)

    # --- Results ------------------------------------------------------------------------------

    def starts(self) -> Iterator[tuple[float, StepState]]:
        """Yield the states of all layers with their bound on the step."""
        for state, found in self.bounds.items():
            least = max(float(found.inner_s[0]), float(found.summed_s[0]))
            if state.device_class >= 0 and least < self.limit_s:
                yield least, state


def _all_reduce_s(
    gradients: Integers, replicas: int, level: int, protocols: Floats, bandwidth: Floats,
    groups: tuple[int, ...],
) -> Floats:  # fmt: skip
    """Compute `Cluster.all_reduce_time_s` of many sizes."""
    time_s, size, inner, ranks = np.zeros(len(gradients)), gradients, 1, replicas
    for index in range(level + 1):
        members = ranks if index == level else max(1, min(ranks, groups[index] // inner))
        if members >= 2:
            small_s, large_s = time_protocols(
                protocols, index, 2 * (members - 1), size / members,
                bandwidth[index, min(members, bandwidth.shape[1] - 1)],
            )  # fmt: skip
            time_s = time_s + np.where(size > 0, np.minimum(small_s, large_s), 0.0)
        size, ranks = -(-size // members), -(-ranks // members)
        inner = max(inner, groups[index])
    return time_s
