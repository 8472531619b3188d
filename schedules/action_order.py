"""Order of work of every schedule, as arrays.

All schedules but the V-shaped ``zbv`` and ``dualpipev`` (`v_shapes`) interlace two sequences on
every rank: its forwards and its backwards. After ``depth`` forwards, backwards and forwards
alternate until no forward is left. A rank with several stages (chunks) takes ``run`` micro-batches
through one chunk, then through the next: forwards in ascending, backwards in descending order of
chunks. With split backwards, the weight part of backward i follows the input part of backward
i + ``delay``. The schedules differ only in these numbers:

============================  ======================  ====================================  =====
P places, n micro-batches     run                     depth at place p                      delay
============================  ======================  ====================================  =====
gpipe, looped_bfs             n                       all
1f1b                          n                       `default_depths`, or the caller's
interleaved_1f1b              n / max(1, n div P)     (chunks - 1) run + 2 (P - 1 - p) + 1
(interleaved_)zero_bubble     n / max(1, n div P)     (chunks - 1) run + (P - 1 - p) + 1    p
============================  ======================  ====================================  =====

These are the orders of ``torch.distributed.pipelining``; zero_bubble is ZB-H1 (Qi et al. 2023),
which torch has as its interleaved zero bubble with one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidInput
from ..core.plan.schedule import ScheduleName, Work
from .layout import Layout, make_layout
from .numba_jit import Kernel
from .traits import IN_ROUNDS
from .v_shapes import KINDS, dualpipev_pattern, zbv_pattern

Ints = NDArray[np.int64]

WORKS = tuple(Work)
"""Kinds of work by their number in `ActionOrder.work`."""

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE = range(len(WORKS))
assert "".join(WORKS) == "FBIWR"


@dataclass(frozen=True)
class ActionOrder:
    """Actions of every rank in order of execution, as one array per column.

    Attributes:
        num_microbatches: Micro-batches per step.
        stage_ranks: Ranks of each stage; micro-batch k runs on entry k mod length.
        first: Rank p's actions are entries ``first[p]`` to ``first[p + 1]`` of the other arrays.
        stage: Stage of each action.
        work: Kind of each action, an index into `WORKS`.
        microbatch: Micro-batch of each action.
    """

    num_microbatches: int
    stage_ranks: tuple[tuple[int, ...], ...]
    first: Ints
    stage: Ints
    work: Ints
    microbatch: Ints

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.first) - 1

    @cached_property
    def trains(self) -> bool:
        return bool((self.work != FORWARD).any())

    @cached_property
    def kinds(self) -> Ints:
        """Work and stage of each action, ``work * stages + stage``."""
        return self.work * self.num_stages + self.stage

    @cached_property
    def counts(self) -> Ints:
        """Return the number of actions of each kind and stage, kind by kind."""
        return np.bincount(self.kinds, minlength=len(WORKS) * self.num_stages)

    @cached_property
    def holders(self) -> tuple[Ints, Ints]:
        """Return the ranks of one stage after the other, and where each stage's begin."""
        counts = [0, *map(len, self.stage_ranks)]
        ranks = [rank for each in self.stage_ranks for rank in each]
        return np.array(ranks, np.int64), np.cumsum(counts, dtype=np.int64)

    @property
    def ranks(self) -> Ints:
        """Return the rank of each action."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.first))


def make_order(
    name: ScheduleName,
    num_microbatches: int,
    replicas: Sequence[int],
    depths: Sequence[int] = (),
    chunks: int = 1,
) -> ActionOrder:
    """Return the order of a schedule, for the arguments of `make_schedule`, in O(actions)."""
    layout = make_layout(name, num_microbatches, replicas, chunks)
    if depths and name != "1f1b":
        raise InvalidInput(f"only the 1f1b schedule takes depths; {name} has fixed ones")
    ranks = _Ranks.of(layout, num_microbatches)
    if layout.folded:
        pattern = zbv_pattern if name == "zbv" else dualpipev_pattern
        return _order_v_shape(pattern, layout, ranks, num_microbatches)
    # The table above, a column each; gpipe and looped_bfs keep these first values.
    before_last = layout.positions - 1 - ranks.position
    run, depth, delay = ranks.microbatches, ranks.actions, None
    if name in IN_ROUNDS or name == "zero_bubble":
        # Micro-batches in as many equal rounds as fill all places, as torch forms them.
        run = run // np.maximum(1, run // layout.positions)
    if name == "1f1b":
        chosen = default_depths(num_microbatches, replicas)
        if depths:
            chosen = check_depths(num_microbatches, replicas, depths)
        depth = np.array(chosen)[ranks.position]
    elif name == "interleaved_1f1b":
        depth = (chunks - 1) * run + 2 * before_last + 1
    elif name in ("zero_bubble", "interleaved_zero_bubble"):
        depth = (chunks - 1) * run + before_last + 1
        delay = ranks.position
    depth = np.minimum(depth, ranks.actions)
    return _interlace(name, layout, ranks, num_microbatches, run, depth, delay)


@dataclass(frozen=True)
class _Ranks:
    """Arrays with one entry per rank.

    A rank's position is its place along the pipeline, its replica the index among the ranks of that
    place; it runs as many forwards (``actions``) as it is dealt micro-batches, times chunks.
    """

    position: Ints
    replica: Ints
    replicas: Ints
    microbatches: Ints
    actions: Ints

    @classmethod
    def of(cls, layout: Layout, num_microbatches: int) -> _Ranks:
        counts = np.array(layout.replicas)
        position = np.repeat(np.arange(len(counts)), counts)
        replica = np.arange(layout.num_ranks) - (np.cumsum(counts) - counts)[position]
        replicas = counts[position]
        dealt = (num_microbatches - replica + replicas - 1) // replicas
        return cls(position, replica, replicas, dealt, dealt * layout.chunks)


def _interlace(
    name: ScheduleName,
    layout: Layout,
    ranks: _Ranks,
    num_microbatches: int,
    run: Ints,
    depth: Ints,
    delay: Ints | None,
) -> ActionOrder:
    works = 1 if name == "forward_only" else 2 if delay is None else 3
    first = np.concatenate(([0], np.cumsum(works * ranks.actions)))
    stage, work, microbatch = (np.empty(first[-1], np.int64) for _ in range(3))
    _fill_interlaced(
        int(first[-1]),
        layout.positions, layout.chunks, ranks.position, ranks.replica, ranks.replicas,
        ranks.microbatches, run, depth, ranks.position if delay is None else delay,
        delay is not None, name == "looped_bfs", first, stage, work, microbatch,
    )  # fmt: skip
    return ActionOrder(num_microbatches, layout.stage_ranks, first, stage, work, microbatch)


@Kernel
def _fill_interlaced(
    positions: int,
    chunks: int,
    position: Ints,
    replica: Ints,
    replicas: Ints,
    microbatches: Ints,
    run: Ints,
    depth: Ints,
    delay: Ints,
    split: bool,
    last_first: bool,
    first: Ints,
    stage: Ints,
    work: Ints,
    microbatch: Ints,
) -> None:
    """Choose each rank's next action until all are done, writing stage, work and micro-batch.

    Ranks are described as in `_Ranks`, with ``run``, ``depth`` and ``delay`` as in the module's
    table. ``split`` says that backwards come in two parts, ``last_first`` that a chunk's backwards
    begin with the last micro-batch.
    """
    # The literals 0 to 3 are FORWARD to BACKWARD_WEIGHT: numba compiles them as constants.
    for rank in range(len(first) - 1):
        count = microbatches[rank] * chunks
        forwards = backwards = weights = 0
        for action in range(first[rank], first[rank + 1]):
            # A weight part that is due goes first, then forwards as far as the depth lets them
            # run ahead; a backward otherwise. What is left at the end are weight parts.
            waiting = backwards - weights if split else 0
            if waiting > delay[rank] or (waiting > 0 and backwards == count):
                what, index = 3, weights
                weights += 1
            elif forwards < min(count, depth[rank] + backwards):
                what, index = 0, forwards
                forwards += 1
            else:
                what, index = 2 if split else 1, backwards
                backwards += 1
            chunk, which = 0, index
            if chunks > 1:
                # The index-th forward counted through all chunks: `run` of them per turn.
                turn = index // run[rank]
                chunk = turn % chunks
                which = turn // chunks * run[rank] + index % run[rank]
            if what != 0:  # backwards visit the chunks from the last to the first
                chunk = chunks - 1 - chunk
                which = microbatches[rank] - 1 - which if last_first else which
            stage[action] = chunk * positions + position[rank]
            work[action] = what
            microbatch[action] = which * replicas[rank] + replica[rank]


def _order_v_shape(
    pattern_of: Callable[[int, int, int], bytes],
    layout: Layout,
    ranks: _Ranks,
    num_microbatches: int,
) -> ActionOrder:
    # A pattern names kinds of actions; place p holds stages p and 2 P - 1 - p.
    patterns = [
        pattern_of(position, layout.positions, dealt)
        for position, dealt in zip(
            ranks.position.tolist(), ranks.microbatches.tolist(), strict=True
        )
    ]
    kinds = np.frombuffer(b"".join(patterns), np.uint8).astype(np.int64)
    begin = np.cumsum([0, *map(len, patterns)])
    first = np.zeros(len(begin), np.int64)
    stage, work, microbatch, put_off = (np.empty(len(kinds), np.int64) for _ in range(4))
    _assign_microbatches(
        len(kinds),
        layout.positions, ranks.position, ranks.replica, ranks.replicas, ranks.microbatches,
        begin, kinds, _CHUNK_OF, _WORK_OF, put_off, first, stage, work, microbatch,
    )  # fmt: skip
    done = first[-1]
    return ActionOrder(
        num_microbatches, layout.stage_ranks, first, stage[:done], work[:done], microbatch[:done]
    )


_CHUNK_OF = np.array([chunk for chunk, _ in KINDS], np.int64)
_WORK_OF = np.array([WORKS.index(work) for _, work in KINDS], np.int64)


@Kernel
def _assign_microbatches(
    positions: int,
    position: Ints,
    replica: Ints,
    replicas: Ints,
    microbatches: Ints,
    begin: Ints,
    kinds: Ints,
    chunk_of: Ints,
    work_of: Ints,
    put_off: Ints,
    first: Ints,
    stage: Ints,
    work: Ints,
    microbatch: Ints,
) -> None:
    """Assign micro-batches to the actions of each pattern and drop those beyond the last one.

    Rank p's pattern is entries ``begin[p]`` to ``begin[p + 1]`` of ``kinds``, which index `KINDS`.
    Per chunk, forwards and backwards take micro-batches in order, and weight parts in the order of
    their input parts: ``put_off`` is scratch space for a queue per chunk of those that are due.
    """
    done = 0
    for rank in range(len(begin) - 1):
        half = (begin[rank + 1] - begin[rank]) // 2  # no chunk has more input parts
        forwards, backwards = [0, 0], [0, 0]
        inputs, weights = [0, 0], [0, 0]
        for action in range(begin[rank], begin[rank + 1]):
            chunk, what = chunk_of[kinds[action]], work_of[kinds[action]]
            room = begin[rank] + chunk * half
            if what == 0:
                index = forwards[chunk]
                forwards[chunk] += 1
            elif what == 3:
                index = put_off[room + weights[chunk]]
                weights[chunk] += 1
            else:
                index = backwards[chunk]
                backwards[chunk] += 1
                if what == 2:
                    put_off[room + inputs[chunk]] = index
                    inputs[chunk] += 1
            if index >= microbatches[rank]:  # patterns are drawn for a minimum of micro-batches
                continue
            stage[done] = position[rank] if chunk == 0 else 2 * positions - 1 - position[rank]
            work[done] = what
            microbatch[done] = index * replicas[rank] + replica[rank]
            done += 1
        first[rank + 1] = done


def default_depths(
    num_microbatches: int, replicas: Sequence[int], extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the default warm-up depth of each stage, per replica.

    A stage with depth d on r ranks has D = d r micro-batches between forward and backward. To keep
    the next stage, with D' of them, busy, a stage has to run D' ahead plus one round of its own:
    d = 1 + ceil(D' / r), starting from d = 1 at the last stage, and at most the n micro-batches
    that a replica gets. With one rank per stage this is min(m, S - s) (PipeDream-Flush, Narayanan
    et al. 2021). PipeDream's rule for replicas, ceil(ranks from here on / r) (Narayanan et al.
    2019), rounds each stage separately; if replicas do not divide each other, that starves stages,
    which costs half of the step and more in the plans of `benchmarks/planner.py`.
    """
    depths: list[int] = []
    ahead = 0
    more = extra or (0,) * len(replicas)
    for count, added in zip(reversed(replicas), reversed(more), strict=True):
        depth = 1 + -(-ahead // count)
        ahead = depth * count
        depths.append(min(depth + added, -(-num_microbatches // count)))
    return tuple(reversed(depths))


def check_depths(
    num_microbatches: int, replicas: Sequence[int], depths: Sequence[int]
) -> tuple[int, ...]:
    """Return chosen depths, capped at the micro-batches of a replica, if they cannot deadlock.

    Stage t begins the backward of micro-batch k after the forward of k + (d_t - 1) r_t. For that
    forward, an earlier stage s needs the backward of k + (d_t - 1) r_t - d_s r_s. The step
    therefore finishes if (d_t - 1) r_t < d_s r_s for all s < t: every backward then waits only for
    backwards of earlier micro-batches.
    """
    if len(depths) != len(replicas):
        raise InvalidInput(f"{len(depths)} depths for {len(replicas)} stages")
    if min(depths) < 1:
        raise InvalidInput(f"a stage runs at least one forward ahead, not {min(depths)}")
    capped = tuple(
        min(depth, -(-num_microbatches // count))
        for depth, count in zip(depths, replicas, strict=True)
    )
    ahead = [depth * count for depth, count in zip(capped, replicas, strict=True)]
    for stage in range(1, len(capped)):
        front = min(range(stage), key=ahead.__getitem__)
        wanted = (capped[stage] - 1) * replicas[stage]
        if wanted >= ahead[front]:
            raise InvalidInput(
                f"stages {front} and {stage} would deadlock: stage {stage} needs {wanted + 1} "
                f"micro-batches before its first backward, but stage {front} sends only "
                f"{ahead[front]} before it waits for one; give stage {front} a depth of at least "
                f"{wanted // replicas[front] + 1}, or stage {stage} a smaller one"
            )
    return capped
