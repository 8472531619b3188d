"""The order of work of each schedule, as arrays.

All but the V-shaped ``zbv`` and ``dualpipev``, which have files of their own, interlace two
sequences on every rank: its forwards and its backwards. After ``depth`` forwards a backward and a
forward take turns until the forwards are done. A rank with several stages (chunks) takes ``run``
micro-batches through one chunk, then through the next, forwards up and backwards down. Where
backwards are split, the weight part of the i-th follows the input part of the (i + ``delay``)-th.
The schedules differ in these numbers alone:

============================  ======================  ====================================  =====
P places, n micro-batches     run                     depth of place p                      delay
============================  ======================  ====================================  =====
gpipe, looped_bfs             n                       all
1f1b                          n                       `default_depths`, or the caller's
interleaved_1f1b              n / max(1, n div P)     (chunks - 1) run + 2 (P - 1 - p) + 1
(interleaved_)zero_bubble     n / max(1, n div P)     (chunks - 1) run + (P - 1 - p) + 1    p
============================  ======================  ====================================  =====

They are the orders of ``torch.distributed.pipelining``; zero_bubble is ZB-H1 (Qi et al. 2023),
torch's interleaved zero bubble with one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidInput
from ..core.plan.schedule import ScheduleName, Work
from .layout import Layout, make_layout
from .numba_jit import Kernel
from .traits import IN_ROUNDS
from .v_shapes import KINDS, dualpipev_pattern, zbv_pattern
from .warmup_depths import checked_depths, default_depths

Ints = NDArray[np.int64]

WORKS = tuple(Work)
"""What the numbers in `Order.work` stand for."""

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE = range(len(WORKS))
assert "".join(WORKS) == "FBIWR"


@dataclass(frozen=True)
class Order:
    """What every rank does, first to last.

    Attributes:
        num_microbatches: Of one step.
        stage_ranks: The ranks of each stage; micro-batch k is done by entry k mod length.
        first: Rank p's actions are entries ``first[p]`` to ``first[p + 1]`` of the other arrays.
        stage: Of each action.
        work: Of each action, an index of `WORKS`.
        microbatch: Of each action.
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

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return bool((self.work != FORWARD).any())

    @property
    def counts(self) -> Ints:
        """How many actions of each work and stage there are, one work after the other."""
        return np.bincount(
            self.work * self.num_stages + self.stage, minlength=len(WORKS) * self.num_stages
        )

    @property
    def ranks(self) -> Ints:
        """The rank of each action."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.first))


def make_order(
    name: ScheduleName,
    num_microbatches: int,
    replicas: Sequence[int],
    depths: Sequence[int] = (),
    chunks: int = 1,
) -> Order:
    """The order of a schedule; arguments and errors are those of `make_schedule`. O(actions)."""
    layout = make_layout(name, num_microbatches, replicas, chunks)
    if depths and name != "1f1b":
        raise InvalidInput(f"depths are for the 1f1b schedule; {name} has its own")
    ranks = _Ranks.of(layout, num_microbatches)
    if layout.folded:
        pattern = zbv_pattern if name == "zbv" else dualpipev_pattern
        return _v_shaped(pattern, layout, ranks, num_microbatches)
    before_last = layout.positions - 1 - ranks.position
    run, depth, delay = ranks.microbatches, ranks.actions, None
    if name in IN_ROUNDS or name == "zero_bubble":
        run = run // np.maximum(1, run // layout.positions)
    if name == "1f1b":
        chosen = default_depths(num_microbatches, replicas)
        if depths:
            chosen = checked_depths(num_microbatches, replicas, depths)
        depth = np.array(chosen)[ranks.position]
    elif name == "interleaved_1f1b":
        depth = (chunks - 1) * run + 2 * before_last + 1
    elif name in ("zero_bubble", "interleaved_zero_bubble"):
        depth = (chunks - 1) * run + before_last + 1
        delay = ranks.position
    depth = np.minimum(depth, ranks.actions)
    return _interlaced(name, layout, ranks, num_microbatches, run, depth, delay)


@dataclass(frozen=True)
class _Ranks:
    """One entry a rank.

    Attributes:
        position: Place along the pipeline.
        replica: Which of the place's ranks.
        replicas: How many the place has.
        microbatches: How many it is dealt.
        actions: Forwards it does: micro-batches times chunks.
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


def _interlaced(
    name: ScheduleName,
    layout: Layout,
    ranks: _Ranks,
    num_microbatches: int,
    run: Ints,
    depth: Ints,
    delay: Ints | None,
) -> Order:
    """Forwards and backwards in turn; the arrays have one entry a rank."""
    works = 1 if name == "forward_only" else 2 if delay is None else 3
    first = np.concatenate(([0], np.cumsum(works * ranks.actions)))
    stage, work, microbatch = (np.empty(first[-1], np.int64) for _ in range(3))
    _interlace(
        int(first[-1]),
        layout.positions, layout.chunks, ranks.position, ranks.replica, ranks.replicas,
        ranks.microbatches, run, depth, ranks.position if delay is None else delay,
        delay is not None, name == "looped_bfs", first, stage, work, microbatch,
    )  # fmt: skip
    return Order(num_microbatches, layout.stage_ranks, first, stage, work, microbatch)


@Kernel
def _interlace(
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
    """What each rank does next, until it has done it all.

    Args:
        positions: Places along the pipeline.
        chunks: Stages a rank.
        position: Of each rank.
        replica: Of each rank.
        replicas: At each rank's place.
        microbatches: Dealt to each rank.
        run: See above.
        depth: See above.
        delay: See above.
        split: Whether backwards are.
        last_first: Whether a chunk's backwards begin with the last micro-batch.
        first: See `Order`.
        stage: Out, see `Order`.
        work: Out, likewise.
        microbatch: Out, likewise.
    """
    for rank in range(len(first) - 1):
        count = microbatches[rank] * chunks
        forwards = backwards = weights = 0
        for action in range(first[rank], first[rank + 1]):
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
                turn = index // run[rank]
                chunk = turn % chunks
                which = turn // chunks * run[rank] + index % run[rank]
            if what != 0:
                chunk = chunks - 1 - chunk
                which = microbatches[rank] - 1 - which if last_first else which
            stage[action] = chunk * positions + position[rank]
            work[action] = what
            microbatch[action] = which * replicas[rank] + replica[rank]


def _v_shaped(
    pattern_of: Callable[[int, int, int], bytes],
    layout: Layout,
    ranks: _Ranks,
    num_microbatches: int,
) -> Order:
    """Stages p and 2 P - 1 - p at place p."""
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
    _number(
        len(kinds),
        layout.positions, ranks.position, ranks.replica, ranks.replicas, ranks.microbatches,
        begin, kinds, _CHUNK_OF, _WORK_OF, put_off, first, stage, work, microbatch,
    )  # fmt: skip
    done = first[-1]
    return Order(
        num_microbatches, layout.stage_ranks, first, stage[:done], work[:done], microbatch[:done]
    )


_CHUNK_OF = np.array([chunk for chunk, _ in KINDS], np.int64)
_WORK_OF = np.array([WORKS.index(work) for _, work in KINDS], np.int64)


@Kernel
def _number(
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
    """Say which micro-batch each action of a pattern is of, and leave out those beyond the last.

    Forwards and backwards take micro-batches in turn, weight parts as their input parts did.

    Args:
        positions: Places along the pipeline.
        position: Of each rank.
        replica: Of each rank.
        replicas: At each rank's place.
        microbatches: Dealt to each rank.
        begin: Rank p's pattern is entries ``begin[p]`` to ``begin[p + 1]`` of ``kinds``.
        kinds: Of each action of the patterns, an index of `KINDS`.
        chunk_of: Of each kind.
        work_of: Of each kind.
        put_off: Room for the micro-batches whose weight parts are to come.
        first: Out, see `Order`.
        stage: Out, see `Order`.
        work: Out, likewise.
        microbatch: Out, likewise.
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
            if index >= microbatches[rank]:
                continue
            stage[done] = position[rank] if chunk == 0 else 2 * positions - 1 - position[rank]
            work[done] = what
            microbatch[done] = index * replicas[rank] + replica[rank]
            done += 1
        first[rank + 1] = done
