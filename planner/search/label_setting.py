"""Shortest paths over stages that also spend devices and micro-batches in flight: exact.

The planner's core. Stages are chosen from the last to the first; what has been chosen so far is
a label, and of two labels at the same position one is dropped if the other is at least as good
in every respect that later choices can notice.

State: at position i, a label (devices used of each class, micro-batches in flight behind,
stages and replicas behind, sum of weights w), for a way to run layers i .. L - 1.
Base: at position N, nothing used, w = 0.
Transition: at position i, for every stage [i, j), class, recomputation, and label at j: the
fewest replicas r that keep the stage's metrics within their limits and fit its memory; its
devices are placed in front of those used (`DeviceClass.place`); w grows by the stage's weight
and by what its cut sends; with q micro-batches in flight behind, it has r (1 + ceil(q / r))
(`default_depths`). More replicas than needed are tried only where they change the link level of
a cut, or leave fewer micro-batches in flight: r = ceil(q / k) for whole k.
Dominance: labels with equal device residues (so that everything in front can be shifted by whole
groups), and w, devices and micro-batches in flight each at most the other's; stages and replicas
too where their number is limited. From a stage of a given number on, labels count down to the
first one, and those at different numbers are not compared. What does not matter to a request is
left out.

O(stages of the profile x labels a position) for each search. This is the resource-constrained
shortest path problem (Irnich and Desaulniers, "Shortest path problems with resource
constraints", 2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...schedules import numba_jit as jit

COLUMNS = ("used", "flying", "stages", "ranks", "weight", "bucket", "key", "parent", "move",
           "config", "count", "end", "front")  # fmt: skip
"""Columns of a `LabelStore`, in order."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

UNLIMITED_BYTES = 2**62

MAX_KEYS = 2**62
"""More sorts of labels than that have no numbers of their own; no search is made then."""

DEPTH_PIPELINE, DEPTH_ALL, DEPTH_ONE = 0, 1, 2
"""How many micro-batches a replica holds: by the replicas behind it, all it gets, or one."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Every stage a search may choose; E stages, C configurations (class and recomputation).

    Attributes:
        num_atoms: N; positions are 0 .. N.
        start: Where the stages that begin at each position start, shape (N + 1,).
        last: Position each stage ends at, shape (E,), ascending for each first position.
        config_class: Class of each configuration, shape (C,).
        config_recompute: Whether it recomputes, shape (C,).
        weight: What a stage adds to the sum, shape (C, E).
        first_unit: What its first metric multiplies, shape (C, E).
        second_unit: What its second metric multiplies, shape (C, E).
        room: Bytes left for activations and buffers, shape (C, E); -1 where it may not be.
        saved: Bytes per micro-batch in flight, shape (C, E).
        fewest: Replicas it has at least, shape (C, E).
        gradients: Bytes summed over replicas, shape (E,).
        arriving: Buffer bytes per micro-batch in front, shape (N + 1,).
        returning: Buffer bytes per micro-batch behind, shape (N + 1,).
        stage_number: Number from the front (1 is the first stage) a stage must have, 0 for any,
            shape (E,).
        offset: What the first metric adds, by first position, shape (N + 1,).
        lead: Time that hides gradient summing, by first position, shape (N + 1,).
        weight_link: What a cut adds to the weight, by level and position, shape (levels, N + 1).
        metric_link: What it adds to the first unit, shape (levels, N + 1).
    """

    num_atoms: int
    start: Integers
    last: Integers
    config_class: Integers
    config_recompute: Integers
    weight: Floats
    first_unit: Floats
    second_unit: Floats
    room: Integers
    saved: Integers
    fewest: Integers
    gradients: Integers
    arriving: Integers
    returning: Integers
    stage_number: Integers
    offset: Floats
    lead: Floats
    weight_link: Floats
    metric_link: Floats


@dataclass(frozen=True, eq=False)
class Machine:
    """The classes of devices and the link levels, as arrays; K classes.

    Attributes:
        total: Devices of each class, shape (K,).
        groups: See `DeviceClass.group_sizes`, shape (K, levels).
        between: Level between two classes, shape (K, K).
        speed: Relative to the slowest class, shape (K,).
        latency: Of each level, shape (levels,).
        bandwidth: Of an all-reduce at each level, shape (levels,).
        granule: Replicas beyond this many take up a multiple of it of devices, and come in
            multiples of it but on the last stage; 0 where they need not.
    """

    total: Integers
    groups: Integers
    between: Integers
    speed: Floats
    latency: Floats
    bandwidth: Floats
    granule: int


@dataclass(frozen=True)
class Rules:
    """What metrics mean and what limits a search.

    The first metric of a stage with n micro-batches a replica is offset + (n - spared) x unit;
    divided by its replicas instead of multiplied where ``per_replica``.
    """

    num_microbatches: int
    depth: int = DEPTH_PIPELINE
    spared: int = 1
    per_replica: bool = False
    sync_scale: float = 1.0
    max_replicas: int = 2**30
    num_stages: int = 0
    max_stages: int = 0
    max_ranks: int = 2**40
    count_ranks: bool = False


@dataclass(frozen=True)
class Limits:
    """Of one search: the largest metrics allowed, and what w may not exceed.

    ``quantum`` 0 compares weights exactly; a positive one only to that many seconds, which loses
    at most one quantum a stage; infinity not at all.
    """

    first: float = np.inf
    second: float = np.inf
    sync: float = np.inf
    weight: float = np.inf
    quantum: float = 0.0


@dataclass(frozen=True)
class Hop:
    """One stage of a path: positions, configuration, replicas and where its devices end."""

    first: int
    last: int
    config: int
    replicas: int
    end: int


@dataclass(frozen=True)
class Found:
    """A path from position 0 to N.

    Attributes:
        hops: Stages, the front one first.
        weight: Sum of their weights and cuts.
        used: Devices used up, idle ones between included, by class.
    """

    hops: tuple[Hop, ...]
    weight: float
    used: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        best: The path of least weight, if there is any.
        others: Every other path that is not dominated, by fewest devices.
        next_first: Least value above its limit the first metric of a refused stage has; below
            it no other path appears.
        least_weight: No path's weight is below, whether it finished or not.
        complete: Whether it finished; if not, nothing can be concluded from an empty ``best``.
    """

    best: Found | None
    others: tuple[Found, ...] = ()
    next_first: float = np.inf
    next_second: float = np.inf
    next_sync: float = np.inf
    least_weight: float = 0.0
    complete: bool = True
    labels: int = 0


@dataclass(frozen=True, eq=False)
class Judged:
    """What holds of every path within limits.

    Attributes:
        least_weight: None is lighter; infinite where there is none.
        nexts: Least value above its limit each metric of a refused stage has.
        count: Replicas that each stage then has at least, -1 where it is no part of any, shape
            (C, E).
    """

    least_weight: float
    nexts: tuple[float, float, float]
    count: Integers


@dataclass(eq=False)
class LabelStore:
    """Labels as columns, all positions one after another."""

    used: Integers
    flying: Integers
    stages: Integers
    ranks: Integers
    weight: Floats
    bucket: Floats
    key: Integers
    parent: Integers
    move: Integers
    config: Integers
    count: Integers
    end: Integers
    front: Integers
    begin: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    finish: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def search(
    moves: Moves,
    machine: Machine,
    rules: Rules,
    limits: Limits,
    *,
    budget: int = 2**62,
    paths: int = 1,
) -> Outcome:
    """The path of least weight whose every stage keeps the limits.

    Args:
        moves: Stages to choose from.
        machine: Devices to place them on.
        rules: Meaning of metrics, depth, and how many stages and replicas are allowed.
        limits: Of this search.
        budget: Labels to look at before giving up.
        paths: How many paths to report at most.
    """
    if _num_keys(moves, machine, rules) > MAX_KEYS:
        return Outcome(None, complete=False)
    if _compiles(moves):
        from .label_kernel import run
    else:
        from .label_setting_numpy import run
    store, nexts, complete = run(moves, machine, rules, limits, budget)
    if not complete:
        return Outcome(None, complete=False, least_weight=float(nexts[3]))
    found = _paths(store, moves, paths)
    return Outcome(
        best=found[0] if found else None,
        others=tuple(found[1:]),
        next_first=float(nexts[0]),
        next_second=float(nexts[1]),
        next_sync=float(nexts[2]),
        least_weight=float(nexts[3]),
        labels=len(store.weight),
    )


def _num_keys(moves: Moves, machine: Machine, rules: Rules) -> int:
    """How many sorts of labels there are that are never compared with each other."""
    number: int = (rules.num_stages + 1) * (last_pin(moves) + 1)
    if machine.groups.shape[1] == 1:
        return number
    residues: list[int] = machine.groups[:, :-1].max(axis=1).tolist()
    return number * math.prod(residues) * len(residues)


def last_pin(moves: Moves) -> int:
    """The largest number from the front that a stage must have; 0 where none must."""
    return int(moves.stage_number.max(initial=0))


def judge(moves: Moves, machine: Machine, rules: Rules, limits: Limits) -> Judged:
    """What is known of all paths within limits without a search, quickly.

    Every stage is counted apart: replicas by its own metrics and by the fewest that can be
    behind it, no placement, all of them together within the devices by their price.
    """
    if _compiles(moves):
        from .label_kernel import judge as compiled_judge

        return compiled_judge(moves, machine, rules, limits)
    from .label_setting_numpy import judge as plain_judge

    return plain_judge(moves, machine, rules, limits)


def _compiles(moves: Moves) -> bool:
    """Whether a problem of this size is worth compiled functions."""
    return jit.is_worthwhile(moves.weight.size * 50)


def restricted(moves: Moves, count: Integers) -> Moves:
    """Only the stages that are part of a path, with what is known of them; see `Judged.count`.

    Rows stay contiguous, which ``[:, kept]`` would not keep: numba compiles every layout anew.
    """
    alive = count > 0
    kept = np.flatnonzero(alive.any(axis=0))
    first = np.repeat(np.arange(moves.num_atoms), np.diff(moves.start))[kept]
    return replace(
        moves,
        start=np.searchsorted(first, np.arange(moves.num_atoms + 1)).astype(np.int64),
        last=moves.last[kept],
        weight=moves.weight.take(kept, axis=1),
        first_unit=moves.first_unit.take(kept, axis=1),
        second_unit=moves.second_unit.take(kept, axis=1),
        room=np.where(alive, moves.room, -1).take(kept, axis=1),
        saved=moves.saved.take(kept, axis=1),
        fewest=np.maximum(count, 1).take(kept, axis=1),
        gradients=moves.gradients[kept],
        stage_number=moves.stage_number[kept],
    )


def empty_store(moves: Moves, machine: Machine) -> LabelStore:
    """No labels but the one at the end, from which every path starts."""
    n = moves.num_atoms
    finish = np.zeros(n + 1, dtype=np.int64)
    finish[n] = 1
    return LabelStore(
        used=np.zeros((1, len(machine.total)), dtype=np.int64),
        flying=np.zeros(1, dtype=np.int64),
        stages=np.zeros(1, dtype=np.int64),
        ranks=np.zeros(1, dtype=np.int64),
        weight=np.zeros(1),
        bucket=np.zeros(1),
        key=np.zeros(1, dtype=np.int64),
        parent=np.full(1, -1, dtype=np.int64),
        move=np.full(1, -1, dtype=np.int64),
        config=np.full(1, -1, dtype=np.int64),
        count=np.zeros(1, dtype=np.int64),
        end=np.zeros(1, dtype=np.int64),
        front=np.zeros(1, dtype=np.int64),
        begin=np.zeros(n + 1, dtype=np.int64),
        finish=finish,
    )


def watches_flying(moves: Moves, rules: Rules) -> bool:
    """Whether micro-batches in flight behind a stage can matter: some memory is limited."""
    return rules.depth == DEPTH_PIPELINE and bool((moves.room < UNLIMITED_BYTES // 2).any())


def _paths(store: LabelStore, moves: Moves, paths: int) -> list[Found]:
    """The least weight first, then by fewest devices."""
    low, high = int(store.begin[0]), int(store.finish[0])
    if low == high:
        return []
    order = sorted(range(low, high), key=lambda index: (float(store.weight[index]), index))
    rest = sorted(order[1:], key=lambda index: (int(store.used[index].sum()), index))
    return [_path(store, moves, index) for index in [order[0], *rest][:paths]]


def _path(store: LabelStore, moves: Moves, index: int) -> Found:
    hops = []
    weight, used = float(store.weight[index]), tuple(int(x) for x in store.used[index])
    while store.parent[index] >= 0:
        move = int(store.move[index])
        first = int(np.searchsorted(moves.start, move, side="right")) - 1
        hops.append(
            Hop(
                first=first,
                last=int(moves.last[move]),
                config=int(store.config[index]),
                replicas=int(store.count[index]),
                end=int(store.end[index]),
            )
        )
        index = int(store.parent[index])
    return Found(tuple(hops), weight, used)
