"""Activation memory of ranks over a step.

It depends on the order of work alone, not on durations: activations are held from the start of a
forward to the end of its backward, or of the weight part if backwards are split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .action_order import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, ActionOrder, Ints


def activation_changes(
    order: ActionOrder, saved_bytes: Sequence[int], recomputed_bytes: Sequence[int] = ()
) -> tuple[Ints, Ints]:
    """Return the bytes allocated when each action starts and those freed when it ends.

    Without backwards a forward saves nothing. A stage keeps its saved bytes per micro-batch from
    forward to backward, and holds the recomputed ones during a backward. If the order has ``R``
    actions, micro-batches without one keep everything.
    """
    forward = order.work == FORWARD
    if forward.all():
        nothing = np.zeros(len(forward), np.int64)
        return nothing, nothing
    saved = np.asarray(saved_bytes, np.int64)[order.stage]
    come, go = np.where(forward, saved, 0), saved.copy()
    if len(recomputed_bytes):
        again = np.asarray(recomputed_bytes, np.int64)[order.stage]
        come += np.where(_holds_all_from(order), again, 0)
        go += again
    go[forward | (order.work == BACKWARD_INPUT) | (order.work == RECOMPUTE)] = 0
    return come, go


def _holds_all_from(order: ActionOrder) -> NDArray[np.bool_]:
    """Return True for the actions from which a recomputing stage holds all activations."""
    forward, again = order.work == FORWARD, order.work == RECOMPUTE
    begins: NDArray[np.bool_] = ~(forward | (order.work == BACKWARD_WEIGHT))
    if not again.any():
        return begins
    kept = np.ones((order.num_stages, order.num_microbatches), bool)
    kept[order.stage[again], order.microbatch[again]] = False
    begins = again | (forward & kept[order.stage, order.microbatch])
    return begins


def peak_activation_bytes(
    order: ActionOrder, saved_bytes: Sequence[int], recomputed_bytes: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return each rank's peak of `activation_changes`, in O(actions)."""
    come, go = activation_changes(order, saved_bytes, recomputed_bytes)
    # One sum over all ranks will do, since each ends with nothing held; `+ go` undoes the release
    # that belongs to the end of the action.
    held = np.cumsum(come - go) + go
    peaks = np.zeros(order.num_ranks, np.int64)
    np.maximum.at(peaks, order.ranks, held)
    return tuple(peaks.tolist())


def most_in_flight(order: ActionOrder) -> tuple[int, ...]:
    """Return the most micro-batches that one replica of each stage holds, in O(n log n) actions."""
    come, go = activation_changes(order, [1] * order.num_stages)
    apart = np.argsort(order.stage * order.num_ranks + order.ranks, kind="stable")
    held = np.cumsum((come - go)[apart]) + go[apart]
    most = np.zeros(order.num_stages, np.int64)
    np.maximum.at(most, order.stage[apart], held)
    return tuple(most.tolist())
