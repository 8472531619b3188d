"""Turn cost tables, devices and options into what the label search works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ...core.plan.plan import OPTIMIZER_BYTES_PER_ELEMENT, PlanOptions
from ...core.profile.profile import Profile
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.assignment import Assignment, moved_forward
from ..cost.device_classes import Devices
from ..cost.stage_table import Mask, StageTable
from .label_setting import (
    DEPTH_ALL,
    DEPTH_ONE,
    DEPTH_PIPELINE,
    UNLIMITED_BYTES,
    Floats,
    Hop,
    Integers,
    Machine,
    Moves,
    Rules,
)

Measure = Literal["1f1b", "gpipe", "throughput", "latency", "simulated_bound"]
"""What the two metrics and the weight of a stage stand for; `docs/planner.md` has the formulas."""


@dataclass(frozen=True, eq=False)
class Space:
    """Everything a plan may be, for one profile, cluster and set of options.

    Attributes:
        tables: Costs of every stage.
        devices: The cluster.
        options: What is asked for.
        only: Stages allowed by constraints, shape (E,); `None` for all.
        stage_number: See `Moves.stage_number`; `None` for any.
        allowed: For each class, which stages it may run, [class, stage]; `None` for all.
    """

    tables: StageTable
    devices: Devices
    options: PlanOptions
    only: Mask | None = None
    stage_number: Integers | None = None
    allowed: Mask | None = None

    @cached_property
    def kept(self) -> slice | Integers:
        """Which of the table's stages may be chosen."""
        return slice(None) if self.only is None else np.flatnonzero(self.only)

    @cached_property
    def start(self) -> Integers:
        """Where the stages beginning at each position start, shape (N + 1,)."""
        positions = np.arange(self.tables.num_atoms + 1)
        return np.searchsorted(self.tables.first[self.kept], positions).astype(np.int64)

    @cached_property
    def recompute_choices(self) -> tuple[bool, ...]:
        return {"never": (False,), "auto": (False, True), "always": (True,)}[self.options.recompute]

    def links(self) -> tuple[Floats, Floats]:
        """Time to send a cut's activations, and its gradients, by level and position."""
        arriving, returning = self.tables.arriving_bytes, self.tables.returning_bytes
        forward, backward = [], []
        for level in self.devices.levels:
            forward.append(_transfer_s(level.latency_s, level.bandwidth_bytes_per_s, arriving))
            backward.append(_transfer_s(level.latency_s, level.bandwidth_bytes_per_s, returning))
        return np.array(forward), np.array(backward)

    def machine(self) -> Machine:
        devices = self.devices
        count = len(devices.classes)
        between = np.zeros((count, count), dtype=np.int64)
        for one in range(count):
            for other in range(count):
                if one != other:
                    between[one, other] = devices.level_between(one, other)
        speeds = np.array([entry.speed for entry in devices.classes])
        levels = len(devices.levels)
        only = devices.classes[0] if count == 1 else None
        inner = only.group_sizes[0] if only and levels > 1 else 0
        whole = inner > 1 and only is not None and len(only) % inner == 0
        return Machine(
            total=np.array([len(entry) for entry in devices.classes], dtype=np.int64),
            groups=np.array(
                [entry.group_sizes[-levels:] for entry in devices.classes], dtype=np.int64
            ),
            between=between,
            speed=speeds / speeds.min(),
            latency=np.array([level.latency_s for level in devices.levels]),
            bandwidth=np.array(
                [
                    level.all_reduce_bandwidth_bytes_per_s or level.bandwidth_bytes_per_s
                    for level in devices.levels
                ]
            ),
            granule=inner if whole else 0,
        )

    def rules(self, measure: Measure) -> Rules:
        options = self.options
        depth = DEPTH_ALL if options.schedule == "gpipe" else DEPTH_PIPELINE
        common = Rules(
            num_microbatches=options.num_microbatches,
            depth=depth,
            max_replicas=options.max_replicas or 2**30,
            num_stages=options.num_stages or 0,
            max_stages=self.max_stages,
        )
        if measure == "throughput":
            return replace(common, per_replica=True, sync_scale=1 / options.num_microbatches)
        if measure == "latency":
            return replace(common, num_microbatches=1, depth=DEPTH_ONE, max_replicas=1)
        if measure == "simulated_bound":
            return replace(common, spared=0, sync_scale=0.0)
        return common

    @property
    def max_stages(self) -> int:
        """At most this many stages; 0 where devices and positions already say so."""
        options = self.options
        most = min(self.tables.most_stages, len(self.devices.cluster.devices))
        limit = options.max_stages or most
        return limit if limit < most else 0

    def moves(self, measure: Measure) -> Moves:
        """Every stage with what it costs by one measure."""
        tables, options = self.tables, self.options
        span, n = self.kept, tables.num_atoms
        first, last = tables.first[span], tables.last[span]
        configs = [
            (index, entry, recompute)
            for index, entry in enumerate(self.devices.classes)
            for recompute in ((False,) if measure == "latency" else self.recompute_choices)
        ]
        training = measure != "latency"
        forward, backward = tables.forward_s[span], tables.backward_s[span]
        again = tables.recompute_s[span]
        saved = tables.saved_bytes[span]
        resident = tables.weights_bytes[span] + tables.workspace_bytes[span]
        if training:
            state = OPTIMIZER_BYTES_PER_ELEMENT[options.optimizer]
            resident = (
                resident + tables.gradients_bytes[span] + state * tables.learned_elements[span]
            )
        weights, firsts, seconds, rooms, kept = [], [], [], [], []
        for index, entry, recompute in configs:
            f = forward / entry.speed
            b = (backward + again if recompute else backward) / entry.speed
            nothing = np.zeros_like(f)
            summed = {"throughput": nothing, "simulated_bound": nothing, "latency": f}
            weights.append(summed.get(measure, f + b))
            firsts.append({"latency": nothing, "gpipe": f}.get(measure, f + b))
            seconds.append(b if measure == "gpipe" else nothing)
            limit = UNLIMITED_BYTES if entry.limit_bytes is None else entry.limit_bytes
            room = limit - resident - (saved if recompute else 0)
            if self.allowed is not None:
                room = np.where(self.allowed[index][span], room, -1)
            rooms.append(np.maximum(room, -1))
            held = tables.input_bytes[first] if recompute else saved
            kept.append(held if training else np.zeros_like(held))
        send_forward, send_backward = self.links()
        both = send_forward + send_backward
        no_link = np.zeros_like(both)
        fastest = self.devices.fastest
        lead = tables.front_backward_s / fastest
        front = tables.front_forward_s / fastest
        if options.schedule not in SPLIT_BACKWARD:  # there gradients run ahead of the work behind
            front = front + lead
        front[n] = 0.0  # nothing begins there
        return Moves(
            num_atoms=n,
            start=self.start,
            last=last,
            config_class=np.array([index for index, _, _ in configs], dtype=np.int64),
            config_recompute=np.array([recompute for _, _, recompute in configs], dtype=np.int64),
            weight=np.array(weights),
            first_unit=np.array(firsts),
            second_unit=np.array(seconds),
            room=np.array(rooms, dtype=np.int64),
            saved=np.array(kept, dtype=np.int64),
            fewest=np.ones((len(configs), len(first)), dtype=np.int64),
            gradients=tables.gradients_bytes[span],
            arriving=tables.arriving_bytes,
            returning=tables.returning_bytes if training else np.zeros(n + 1, dtype=np.int64),
            stage_number=(
                np.zeros(len(first), dtype=np.int64)
                if self.stage_number is None
                else self.stage_number[span]
            ),
            offset=front if measure == "simulated_bound" else np.zeros(n + 1),
            lead=np.zeros(n + 1) if measure == "throughput" else lead,
            weight_link={"latency": send_forward, "1f1b": both, "gpipe": both}.get(
                measure, no_link
            ),
            metric_link=both if measure in ("1f1b", "throughput") else no_link,
        )


def _transfer_s(latency_s: float, bandwidth: float, sizes: Integers) -> Floats:
    """`LinkLevel.transfer_time_s` of many messages."""
    return np.where(sizes > 0, latency_s + sizes / bandwidth, 0.0)


def coarse_positions(profile: Profile, positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """At most so many of the positions, about equal work apart, both ends among them.

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


def from_hops(
    hops: Sequence[Hop], tables: StageTable, config_class: Sequence[int],
    config_recompute: Sequence[int], devices: Devices,
) -> Assignment:  # fmt: skip
    """What a path of the search stands for, moved to the first devices it can be moved to."""
    order, cuts = tables.layout([*(hop.first for hop in hops), hops[-1].last])
    found = Assignment(
        cuts=cuts,
        replicas=tuple(hop.replicas for hop in hops),
        classes=tuple(int(config_class[hop.config]) for hop in hops),
        ends=tuple(hop.end for hop in hops),
        recompute=tuple(bool(config_recompute[hop.config]) for hop in hops),
        order=order,
    )
    return moved_forward(found, devices)
