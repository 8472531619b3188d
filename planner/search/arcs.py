"""Stage arcs of a request: cost tables, devices and options as inputs of the label search.

The inputs are NamedTuples of arrays, which numba compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from ...core.models.training_memory import TrainingBytes, training_bytes
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.assignment import Assignment, shift_forward
from ..cost.chain import Mask, StageTable
from ..cost.device_classes import DeviceClass, Devices
from ..cost.sharing import SharedBytes, list_shared, sent_each_round
from .device_pool import DevicePool, Floats, Integers, build_pool

UNLIMITED_BYTES = 2**62

DEPTH_PIPELINE, DEPTH_ALL, DEPTH_ONE = 0, 1, 2
"""Micro-batches a replica holds: by what is in flight behind it, all it gets, or one."""


class StageArcs(NamedTuple):
    """All stages a search may choose, as arrays that numba can compile.

    A arcs over N atoms, sorted by first position, then device class and recomputation, then last
    position. The first group of fields has shape (A,), the second (N + 1,), the third
    (levels, N + 1).

    Attributes:
        first_arc: Arcs from position i are ``first_arc[i] : first_arc[i + 1]``, shape (N + 1,).
        last: Position behind the stage.
        device_class: Class it runs on.
        recompute: 1 if it recomputes its activations.
        weight: What it adds to the sum, in seconds.
        first_unit: Seconds per micro-batch of its first metric.
        second_unit: Seconds per micro-batch of its second metric.
        room: Bytes left for activations, buffers and what replicas share; -1 if the stage is
            not allowed.
        divided: Bytes that replicas may share; see `SharedBytes`.
        whole: Bytes that a replica that shares holds beside its part.
        saved: Bytes per micro-batch in flight.
        min_replicas: Replicas it is known to need.
        gradients: Bytes to all-reduce over its replicas.
        once: Those of replicas that share, in a step.
        each_round: Those of replicas that share, for every micro-batch of one.
        stage_number: Number from the front (1 is the first stage) it must have; 0 for any.
        arriving: Bytes of a receive from the front, by first position.
        returning: Bytes of a receive from behind, by last position.
        offset: Seconds added to the first metric, by first position.
        lead: Seconds of backward work in front that hide gradient summing, by first position.
        weight_link: Seconds a cut adds to the weight, by level and position.
        metric_link: Seconds a cut adds to ``first_unit``, by level and position.
    """

    first_arc: Integers
    last: Integers
    device_class: Integers
    recompute: Integers
    weight: Floats
    first_unit: Floats
    second_unit: Floats
    room: Integers
    divided: Integers
    whole: Integers
    saved: Integers
    min_replicas: Integers
    gradients: Integers
    once: Integers
    each_round: Integers
    stage_number: Integers
    arriving: Integers
    returning: Integers
    offset: Floats
    lead: Floats
    weight_link: Floats
    metric_link: Floats

    def first_positions(self) -> Integers:
        """Return the position each arc starts from, shape (A,)."""
        return np.repeat(np.arange(len(self.first_arc) - 1), np.diff(self.first_arc))

    def find(self, first: int, last: int, device_class: int, *, recompute: bool) -> int:
        """Return the index of one arc."""
        start, stop = self.first_arc[first : first + 2]
        is_wanted = (
            (self.last[start:stop] == last)
            & (self.device_class[start:stop] == device_class)
            & (self.recompute[start:stop] == recompute)
        )
        return int(start + is_wanted.argmax())

    def prune(self, replicas: Integers) -> StageArcs:
        """Return the arcs with positive entries, which become their least replicas."""
        kept = np.flatnonzero(replicas > 0)
        positions = np.arange(len(self.first_arc))
        first_arc = np.searchsorted(self.first_positions()[kept], positions)
        columns = {name: getattr(self, name)[kept] for name in ARC_COLUMNS}
        pruned = self._replace(first_arc=first_arc.astype(np.int64), **columns)
        return pruned._replace(min_replicas=replicas[kept])


ARC_COLUMNS = StageArcs._fields[1:16]
"""Fields of `StageArcs` with one entry per arc."""


class SearchRules(NamedTuple):
    """Meaning of the metrics and the limits that hold for all searches of a request.

    The first metric of a stage with n micro-batches per replica is offset + (n - spared) x unit,
    or unit / replicas if ``per_replica``. Zero stages mean no limit.
    """

    num_microbatches: int
    depth: int = DEPTH_PIPELINE
    spared: int = 1
    per_replica: bool = False
    sync_scale: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 2**30
    num_stages: int = 0
    max_stages: int = 0
    max_total_replicas: int = 2**40
    count_replicas: bool = False


class MetricCaps(NamedTuple):
    """Caps of one search: the largest metrics, and the largest total of a path, in seconds.

    A path's total is its sum of weights and the longest summing of gradients that is exposed.
    With ``quantum`` 0 totals are compared exactly; with a positive one only to that many seconds,
    which loses at most one quantum per stage; with infinity they are not compared.
    """

    first: float = math.inf
    second: float = math.inf
    weight: float = math.inf
    quantum: float = 0.0


Measure = Literal["1f1b", "gpipe", "throughput", "latency", "simulated_bound"]
"""What weight and metrics of a stage stand for; `docs/concepts/planner.md` has the formulas."""


@dataclass(frozen=True)
class StageArc:
    """One stage of a path; its devices end before index ``end`` of its class."""

    first: int
    last: int
    device_class: int
    recompute: bool
    replicas: int
    end: int


class _ArcCosts(NamedTuple):
    """Costs of every stage on one device class, recomputed or not, shape (E,)."""

    weight: Floats
    first_unit: Floats
    second_unit: Floats
    room: Integers
    saved: Integers


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """All plans of one profile, cluster and set of options.

    ``only`` masks the stages that constraints allow, shape (E,); ``allowed`` those of each class,
    [class, stage]; ``stage_number`` is that of `StageArcs`. `None` stands for all. Stages have at
    least ``min_replicas``.
    """

    tables: StageTable
    devices: Devices
    options: PlanOptions
    only: Mask | None = None
    stage_number: Integers | None = None
    allowed: Mask | None = None
    min_replicas: int = 1

    @cached_property
    def chosen(self) -> slice | Integers:
        """The stages of the table that may be chosen."""
        return slice(None) if self.only is None else np.flatnonzero(self.only)

    def link_times_s(self) -> tuple[Floats, Floats]:
        """Return the time to send a cut's activations, and its gradients, [level, position]."""
        arriving, returning = self.tables.arriving_bytes, self.tables.returning_bytes
        forward, backward = [], []
        for level in self.devices.bounding_levels:
            forward.append(_transfer_s(level.latency_s, level.bandwidth_bytes_per_s, arriving))
            backward.append(_transfer_s(level.latency_s, level.bandwidth_bytes_per_s, returning))
        return np.array(forward), np.array(backward)

    def pool(self) -> DevicePool:
        """Return the device classes as arrays."""
        return build_pool(self.devices)

    def rules(self, measure: Measure) -> SearchRules:
        """Return the meaning of the metrics by one measure, and the limits asked for."""
        options = self.options
        common = SearchRules(
            num_microbatches=options.num_microbatches,
            depth=DEPTH_ALL if options.schedule == "gpipe" else DEPTH_PIPELINE,
            min_replicas=self.min_replicas,
            max_replicas=options.max_replicas or 2**30,
            num_stages=options.num_stages or 0,
            max_stages=self.max_stages,
        )
        if measure == "throughput":
            return common._replace(per_replica=True, sync_scale=1 / options.num_microbatches)
        if measure == "latency":
            return common._replace(num_microbatches=1, depth=DEPTH_ONE, max_replicas=1)
        if measure == "simulated_bound":
            return common._replace(spared=0, sync_scale=0.0)
        return common

    @property
    def max_stages(self) -> int:
        """Most stages allowed; 0 where devices and positions already say so."""
        options = self.options
        most = min(self.tables.most_stages, len(self.devices.cluster.devices))
        limit = options.max_stages or most
        return limit if limit < most else 0

    def arcs(self, measure: Measure) -> StageArcs:
        """Return every stage on every class with its costs by one measure."""
        tables, chosen = self.tables, self.chosen
        n, first = tables.num_atoms, tables.first[chosen]
        again = {"never": (False,), "auto": (False, True), "always": (True,)}
        recompute_choices = (False,) if measure == "latency" else again[self.options.recompute]
        configs = [
            (index, recompute)
            for index in range(len(self.devices.classes))
            for recompute in recompute_choices
        ]
        costs = [self._arc_costs(measure, index, recompute) for index, recompute in configs]
        # configuration by configuration so far; by position first, where ties between plans are
        # settled by configuration, then by last position
        order = np.argsort(np.tile(first, len(configs)), kind="stable")
        stages = np.tile(np.arange(len(first)), len(configs))[order]
        config = np.repeat(np.arange(len(configs)), len(first))[order]
        numbers, shared = self.stage_number, SharedBytes(*(each[stages] for each in self.shared))
        again_here = np.array([recompute for _, recompute in configs], dtype=np.int64)[config]
        gradients = self._gradients_bytes()[stages]
        return StageArcs(
            first_arc=np.searchsorted(first[stages], np.arange(n + 1)).astype(np.int64),
            last=tables.last[chosen][stages],
            device_class=np.array([index for index, _ in configs], dtype=np.int64)[config],
            recompute=again_here,
            weight=np.concatenate([each.weight for each in costs])[order],
            first_unit=np.concatenate([each.first_unit for each in costs])[order],
            second_unit=np.concatenate([each.second_unit for each in costs])[order],
            room=np.concatenate([each.room for each in costs])[order],
            divided=shared.divided,
            whole=shared.whole,
            saved=np.concatenate([each.saved for each in costs])[order],
            min_replicas=np.full(len(order), self.min_replicas, dtype=np.int64),
            gradients=gradients,
            once=gradients - shared.gradients,
            each_round=sent_each_round(self.options, shared, again_here),
            stage_number=(
                np.zeros(len(order), dtype=np.int64) if numbers is None else numbers[chosen][stages]
            ),
            **self._position_costs(measure),
        )

    def _arc_costs(self, measure: Measure, index: int, recompute: bool) -> _ArcCosts:
        """Price every stage on one class, with or without recomputation."""
        tables, chosen, entry = self.tables, self.chosen, self.devices.classes[index]
        saved = tables.saved_bytes[chosen]
        backward = tables.backward_s[chosen]
        if recompute:
            backward = backward + tables.recompute_s[chosen]
        f, b = tables.forward_s[chosen] / entry.speed, backward / entry.speed
        zero = np.zeros_like(f)
        weights = {"throughput": zero, "simulated_bound": zero, "latency": f}
        room = self._room(entry, training=measure != "latency")
        if recompute:  # while a micro-batch is recomputed, its activations are there once
            room = room - saved
        if self.allowed is not None:
            room = np.where(self.allowed[index][chosen], room, -1)
        kept = tables.input_bytes[tables.first[chosen]] if recompute else saved
        return _ArcCosts(
            weight=weights.get(measure, f + b),
            first_unit={"latency": zero, "gpipe": f}.get(measure, f + b),
            second_unit=b if measure == "gpipe" else zero,
            room=np.maximum(room, -1).astype(np.int64),
            saved=np.zeros_like(kept) if measure == "latency" else kept,
        )

    @property
    def training(self) -> TrainingBytes:
        return training_bytes(self.options.precision, self.options.optimizer)

    @cached_property
    def shared(self) -> SharedBytes:
        """Return what the replicas of every stage may share."""
        return list_shared(self.options, self.tables, self.chosen)

    def _gradients_bytes(self) -> Integers:
        tables, chosen = self.tables, self.chosen
        more: Integers = self.training.gradients * tables.learned_elements[chosen]
        return tables.gradients_bytes[chosen] + more

    def _room(self, entry: DeviceClass, *, training: bool) -> Integers:
        """Return the bytes left of a device by what every replica of a stage holds for itself."""
        tables, chosen = self.tables, self.chosen
        resident = tables.weights_bytes[chosen] + tables.workspace_bytes[chosen]
        if training:
            resident = resident + tables.gradients_bytes[chosen]
            resident = resident + self.training.of(tables.learned_elements[chosen])
            resident = resident - self.shared.divided
        limit = UNLIMITED_BYTES if entry.limit_bytes is None else entry.limit_bytes
        room: Integers = limit - resident
        return room

    def _position_costs(self, measure: Measure) -> dict[str, Any]:
        """Return the fields of `StageArcs` that belong to positions and cuts."""
        tables, n = self.tables, self.tables.num_atoms
        send_forward, send_backward = self.link_times_s()
        both, free = send_forward + send_backward, np.zeros_like(send_forward)
        lead = tables.front_backward_s / self.devices.fastest
        front = tables.front_forward_s / self.devices.fastest
        if self.options.schedule not in SPLIT_BACKWARD:
            front = front + lead  # there, gradients run ahead of the work in front
        front[n] = 0.0  # no stage begins there
        links = {"latency": send_forward, "1f1b": both, "gpipe": both}
        latency = measure == "latency"
        return {
            "arriving": tables.arriving_bytes,
            "returning": np.zeros(n + 1, dtype=np.int64) if latency else tables.returning_bytes,
            "offset": front if measure == "simulated_bound" else np.zeros(n + 1),
            "lead": np.zeros(n + 1) if measure == "throughput" else lead,
            "weight_link": links.get(measure, free),
            "metric_link": both if measure in ("1f1b", "throughput") else free,
        }


def _transfer_s(latency_s: float, bandwidth: float, sizes: Integers) -> Floats:
    """Compute `LinkLevel.transfer_time_s` of many messages."""
    return np.where(sizes > 0, latency_s + sizes / bandwidth, 0.0)


def coarse_positions(profile: Profile, positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Choose at most ``count`` positions about equal work apart, both ends among them.

    Of the positions within half an interval of an even one, the one that sends least is taken.
    """
    n = len(positions) - 1
    if n <= count:
        return positions
    layer_s = [entry.forward.median_s + entry.backward.median_s for entry in profile.layers]
    work = np.concatenate([[0.0], np.cumsum(layer_s)])[list(positions)]
    gaps = profile.boundaries
    sent = [gaps[edge - 1].forward_bytes + gaps[edge - 1].backward_bytes for edge in positions[1:n]]
    sizes = np.array([0, *sent, 0])
    chosen = {0, n}
    targets = np.arange(1, count) * (work[n] / count)
    lows = np.searchsorted(work, targets - work[n] / count / 2)
    highs = np.searchsorted(work, targets + work[n] / count / 2)
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        first, last = max(1, low), min(n, max(high, low + 1))
        if first < last:
            chosen.add(first + int(np.argmin(sizes[first:last])))
    return tuple(positions[index] for index in sorted(chosen))


def to_assignment(arcs: Sequence[StageArc], tables: StageTable, devices: Devices) -> Assignment:
    """Return the plan a path stands for, on the first devices it can be moved to."""
    order, cuts = tables.layout([*(arc.first for arc in arcs), arcs[-1].last])
    found = Assignment(
        cuts=cuts,
        replicas=tuple(arc.replicas for arc in arcs),
        classes=tuple(arc.device_class for arc in arcs),
        ends=tuple(arc.end for arc in arcs),
        recompute=tuple(arc.recompute for arc in arcs),
        order=order,
    )
    return shift_forward(found, devices)
