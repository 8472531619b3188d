"""Exact label setting: shortest paths over stage arcs that also spend devices and memory.

The planner's core. A plan is a path of stage arcs from position 0 to position N; an arc from i to
j is a stage that runs atoms i .. j - 1 on one device class, with or without recomputation. Paths
are built from the last stage to the first, because a 1F1B stage holds as many micro-batches as
the stages behind it keep in flight.

State: a label at position i stands for one way to run atoms i .. N - 1. It records the devices
    used of each class (d), the micro-batches in flight at those stages (q), the number of stages
    and replicas, the sum of weights (w), and the longest exposed summing of gradients (e).
Base case: one label at position N with d = 0, q = 0, w = 0, e = 0.
Transition: for every arc i -> j and every label at j, choose r, the fewest replicas that keep the
    stage's metrics within their caps and fit its memory. Its devices are placed in front of those
    used (`DeviceClass.place`). Then
        w(i) = w(j) + weight(arc) + weight of sending over the cut at j
        q(i) = r (1 + ceil(q(j) / r))
        e(i) = max(e(j), exposed summing of the stage's gradients)
    More replicas than needed are tried only where that changes the link level of a cut or leaves
    fewer micro-batches in flight: r = ceil(q / k) for whole k; below `DevicePool.regular_from`,
    where more replicas may sum faster, all numbers are.
Bound: a label is dropped if w + e plus the least weight in front of i exceeds the cap, if the
    devices left are fewer than the layers in front need, or if both together, at a price of each
    class of devices (`device_prices`), do. `relaxation_kernel.relax_arcs` computes the three, and
    the arcs that no path within the caps can have.
Dominance: of two labels at i with equal keys one is dropped if the other's w, w + e, d and q are
    all at most its own (with e' of the stages in front, max(w + e, w + e') is then at most the
    other's); stages and replicas too where their number is limited. Equal keys mean equal
    device residues, so that everything in front can be shifted by whole groups. From a stage of a
    pinned number on, labels count down to the first stage, and different numbers have different
    keys. Respects that a request cannot notice are not compared.
Arcs that were put in front of no label are part of no path within these caps or tighter ones, and
    no other needs fewer replicas than it had there: the label that dominates the one on such a path
    could have had the arc, too. Searches of parts of a box look at those arcs only.
Complexity: O(arcs x labels per position) time for each search, O(N x labels per position) memory.
Beam: with several classes of devices labels differ in what they use of each, and soon are millions
    at one position. A search that keeps only the cheapest at those prices finds plans in
    O(arcs x beam), and proves nothing.
This is the resource-constrained shortest path problem (Irnich and Desaulniers, "Shortest path
problems with resource constraints", 2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...schedules.numba_jit import Kernel
from . import label_kernel as kernel
from .arcs import DEPTH_PIPELINE, UNLIMITED_BYTES, MetricCaps, SearchRules, StageArc, StageArcs
from .device_pool import DevicePool, Floats, Integers
from .label_table import ARC, COUNT, END, PARENT, USED
from .relaxation_kernel import relax_arcs

MAX_KEYS = 2**62
"""Keys are int64; with more combinations of residues and numbers than that no search is made."""

STEPS_PER_ARC = 50
"""Basic operations of a search for each arc, roughly; decides whether compiled code pays."""

STEPS_PER_LABEL = 4
"""Basic operations for each arc and label of a beam."""


_SEARCH = Kernel(kernel.search_labels)
_RELAX = Kernel(relax_arcs)


@dataclass(frozen=True)
class ArcPath:
    """A path from position 0 to N; its total is its weight and the longest exposed summing."""

    arcs: tuple[StageArc, ...]
    weight: float
    total: float
    used: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """Result of one label search.

    Attributes:
        best: The path of least total, if there is any.
        others: Other undominated paths, by fewest devices.
        next_metrics: Least value above its cap that each metric of a refused stage has; no other
            path appears with caps below these.
        least_weight: A lower bound of every path's total, complete or not.
        complete: False if the budget ran out or a beam left labels out; then an empty ``best``
            proves nothing.
        labels: Labels kept.
        replicas: Fewest replicas of each arc that a path within the caps may have, 0 if none has
            it, shape (A,); `None` if nothing is known.
    """

    best: ArcPath | None
    others: tuple[ArcPath, ...] = ()
    next_metrics: tuple[float, float] = (math.inf, math.inf)
    least_weight: float = 0.0
    complete: bool = True
    labels: int = 0
    replicas: Integers | None = None

    def paths(self) -> Iterator[ArcPath]:
        """Yield the best path, then the others."""
        if self.best is not None:
            yield self.best
            yield from self.others


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Facts about all paths within the caps, from stages considered apart from each other.

    ``least_weight`` bounds every path's weight, infinite where there is no path; ``replicas`` are
    those each arc needs at least, -1 if no path uses it, shape (A,). ``prices`` of a device of each
    class gave that bound.
    """

    least_weight: float
    next_metrics: tuple[float, float]
    replicas: Integers
    prices: Floats


def search(
    arcs: StageArcs,
    pool: DevicePool,
    rules: SearchRules,
    caps: MetricCaps,
    *,
    budget: int = 2**62,
    paths: int = 1,
    beam: int = 0,
    prices: Floats | None = None,
) -> SearchOutcome:
    """Find the path of least total on which every stage keeps the caps.

    It gives up after ``budget`` candidate labels, and reports at most that many ``paths``. With a
    ``beam`` it keeps at most so many labels of a position: it is quick, and incomplete where it
    left some out. Prices of devices are sought near the ``prices`` given.
    """
    caps = MetricCaps(*map(float, caps))  # Python's floats are quicker than numpy's scalars
    last_pin = int(arcs.stage_number.max(initial=0))
    if _num_keys(pool, rules, last_pin) > MAX_KEYS:
        return SearchOutcome(None, complete=False)
    steps = len(arcs.last) * max(STEPS_PER_ARC, STEPS_PER_LABEL * beam)
    _SEARCH.check_time(steps)
    found = _SEARCH(
        steps, arcs, pool, rules, caps, budget, _tracks_in_flight(arcs, rules), last_pin, beam,
        np.zeros(len(pool.total)) if prices is None else prices,
    )  # fmt: skip
    least_weight = float(found.least_weight)
    is_known = found.complete or not beam
    reached = np.asarray(found.reached, dtype=np.int64) if is_known else None
    if not found.complete and not beam:
        return SearchOutcome(None, complete=False, least_weight=least_weight, replicas=reached)
    reported = _read_paths(found, arcs, len(pool.total), paths)
    return SearchOutcome(
        best=reported[0] if reported else None,
        others=tuple(reported[1:]),
        next_metrics=_pair(found.next_metrics),
        least_weight=least_weight,
        complete=bool(found.complete),
        labels=found.num_labels,
        replicas=reached,
    )


def relax(
    arcs: StageArcs, pool: DevicePool, rules: SearchRules, caps: MetricCaps,
    prices: Floats | None = None,
) -> Relaxation:  # fmt: skip
    """Bound all paths within the caps quickly, without placing anything.

    O(A): every stage gets the fewest replicas that its own metrics, its memory and the fewest
    replicas behind it allow; all of them together share the devices at prices, which are sought
    near those given.
    """
    steps = len(arcs.last) * STEPS_PER_ARC
    _RELAX.check_time(steps)
    next_metrics, found = _RELAX(
        steps, arcs, pool, rules, MetricCaps(*map(float, caps)),
        np.zeros(len(pool.total)) if prices is None else prices,
    )  # fmt: skip
    replicas = np.full(len(arcs.last), -1, dtype=np.int64)
    replicas[np.asarray(found.arc, dtype=np.int64)] = found.replicas
    prices = np.asarray(found.prices, dtype=np.float64)
    return Relaxation(float(found.least_weight), _pair(next_metrics), replicas, prices)


def _num_keys(pool: DevicePool, rules: SearchRules, last_pin: int) -> int:
    """Return the number of keys, that is of kinds of labels never compared with each other."""
    number: int = (rules.num_stages + 1) * (last_pin + 1)
    if pool.groups.shape[1] == 1:
        return number
    residues: list[int] = pool.groups[:, :-1].max(axis=1).tolist()
    return number * math.prod(residues) * len(residues)


def _tracks_in_flight(arcs: StageArcs, rules: SearchRules) -> bool:
    """Return True if micro-batches in flight behind a stage can matter: some memory is limited."""
    return rules.depth == DEPTH_PIPELINE and bool((arcs.room < UNLIMITED_BYTES // 2).any())


def _pair(values: Floats | list[float]) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def _read_paths(
    found: kernel.Labels, arcs: StageArcs, num_classes: int, paths: int
) -> list[ArcPath]:
    """Read the labels at position 0 as paths: least total first, then by fewest devices."""
    low, high = int(found.begin[0]), int(found.finish[0])
    width = USED + num_classes

    def used(label: int) -> tuple[int, ...]:
        at = label * width + USED
        return tuple(int(count) for count in found.columns[at : at + num_classes])

    order = sorted(range(low, high), key=lambda label: (float(found.total[label]), label))
    rest = sorted(order[1:], key=lambda label: (sum(used(label)), label))
    return [
        ArcPath(
            _read_arcs(found, arcs, width, label),
            float(found.weight[label]),
            float(found.total[label]),
            used(label),
        )
        for label in [*order[:1], *rest][:paths]
    ]


def _read_arcs(
    found: kernel.Labels, arcs: StageArcs, width: int, label: int
) -> tuple[StageArc, ...]:
    """Follow a label's parents to position N, where the one of the base case has none."""
    read = []
    while label:
        row = found.columns[label * width : (label + 1) * width]
        arc = int(row[ARC])
        read.append(
            StageArc(
                first=int(np.searchsorted(arcs.first_arc, arc, side="right")) - 1,
                last=int(arcs.last[arc]),
                device_class=int(arcs.device_class[arc]),
                recompute=bool(arcs.recompute[arc]),
                replicas=int(row[COUNT]),
                end=int(row[END]),
            )
        )
        label = int(row[PARENT])
    return tuple(read)
