"""The activations that ranks hold while they work.

They depend on the order of work alone, not on its durations: held from the start of a forward to
the end of its backward, the weight part where backwards are split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .action_order import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Ints, Order


def changes(
    order: Order, saved_bytes: Sequence[int], recomputed_bytes: Sequence[int] = ()
) -> tuple[Ints, Ints]:
    """Bytes that come when each action starts, and bytes that go when it ends.

    Without backwards a forward saves nothing.

    Args:
        order: Of all ranks.
        saved_bytes: What each stage keeps per micro-batch from its forward to its backward.
        recomputed_bytes: What each stage computes again for the time of a backward, none if empty.
            Where the order says when (``R``), micro-batches that it does not name keep it all.
    """
    forward = order.work == FORWARD
    if forward.all():
        nothing = np.zeros(len(forward), np.int64)
        return nothing, nothing
    saved = np.asarray(saved_bytes, np.int64)[order.stage]
    come, go = np.where(forward, saved, 0), saved.copy()
    if len(recomputed_bytes):
        again = np.asarray(recomputed_bytes, np.int64)[order.stage]
        come += np.where(_begins(order), again, 0)
        go += again
    go[forward | (order.work == BACKWARD_INPUT) | (order.work == RECOMPUTE)] = 0
    return come, go


def _begins(order: Order) -> NDArray[np.bool_]:
    """The actions from which a recomputing stage holds everything."""
    forward, again = order.work == FORWARD, order.work == RECOMPUTE
    begins: NDArray[np.bool_] = ~(forward | (order.work == BACKWARD_WEIGHT))
    if not again.any():
        return begins
    kept = np.ones((order.num_stages, order.num_microbatches), bool)
    kept[order.stage[again], order.microbatch[again]] = False
    begins = again | (forward & kept[order.stage, order.microbatch])
    return begins


def peak_activation_bytes(
    order: Order, saved_bytes: Sequence[int], recomputed_bytes: Sequence[int] = ()
) -> tuple[int, ...]:
    """The most each rank holds at once; arguments as for `changes`. O(actions)."""
    come, go = changes(order, saved_bytes, recomputed_bytes)
    held = np.cumsum(come - go) + go  # every rank ends with nothing held
    peaks = np.zeros(order.num_ranks, np.int64)
    np.maximum.at(peaks, order.ranks, held)
    return tuple(peaks.tolist())


def most_in_flight(order: Order) -> tuple[int, ...]:
    """Most micro-batches one replica of each stage holds at once. O(actions log actions)."""
    come, go = changes(order, [1] * order.num_stages)
    apart = np.argsort(order.stage * order.num_ranks + order.ranks, kind="stable")
    held = np.cumsum((come - go)[apart]) + go[apart]
    most = np.zeros(order.num_stages, np.int64)
    np.maximum.at(most, order.stage[apart], held)
    return tuple(most.tolist())
