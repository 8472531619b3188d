"""Inputs of the label search as NamedTuples of arrays, which numba compiles."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

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
        room: Bytes left for activations and buffers; -1 if the stage is not allowed.
        saved: Bytes per micro-batch in flight.
        min_replicas: Replicas it is known to need.
        gradients: Bytes to all-reduce over its replicas.
        stage_number: Number from the front (1 is the first stage) it must have; 0 for any.
        arriving: Receive-buffer bytes per micro-batch from the front, by first position.
        returning: Receive-buffer bytes per micro-batch from behind, by last position.
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
    saved: Integers
    min_replicas: Integers
    gradients: Integers
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
        """Return the arcs with positive entries, which become their least replicas.

        Args:
            replicas: See `Relaxation.replicas`.
        """
        kept = np.flatnonzero(replicas > 0)
        positions = np.arange(len(self.first_arc))
        first_arc = np.searchsorted(self.first_positions()[kept], positions)
        columns = {name: getattr(self, name)[kept] for name in ARC_COLUMNS}
        pruned = self._replace(first_arc=first_arc.astype(np.int64), **columns)
        return pruned._replace(min_replicas=replicas[kept])


ARC_COLUMNS = StageArcs._fields[1:12]
"""Fields of `StageArcs` with one entry per arc."""


class DevicePool(NamedTuple):
    """Device classes and link levels as arrays; K classes.

    Attributes:
        total: Devices of each class, shape (K,).
        groups: See `DeviceClass.group_sizes`, shape (K, levels).
        between: Level between two classes, shape (K, K).
        speed: Relative to the slowest class, shape (K,).
        latency: Seconds, by level, shape (levels,).
        bandwidth: Bytes per second of an all-reduce, by level, shape (levels,).
        granule: More replicas than this occupy a multiple of it of devices, and on all but the
            last stage come in multiples of it; 0 where they need not.
    """

    total: Integers
    groups: Integers
    between: Integers
    speed: Floats
    latency: Floats
    bandwidth: Floats
    granule: int


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
    max_replicas: int = 2**30
    num_stages: int = 0
    max_stages: int = 0
    max_total_replicas: int = 2**40
    count_replicas: bool = False


class MetricCaps(NamedTuple):
    """Caps of one search: the largest metrics and the largest sum of weights, in seconds.

    With ``quantum`` 0 weights are compared exactly; with a positive one only to that many
    seconds, which loses at most one quantum per stage; with infinity they are not compared.
    """

    first: float = math.inf
    second: float = math.inf
    sync: float = math.inf
    weight: float = math.inf
    quantum: float = 0.0
