"""Order of work of the V-shaped schedules, ZBV and DualPipeV.

Place p of P holds stages p and 2 P - 1 - p. An order is written as a pattern of `KINDS`, drawn for
a minimum of micro-batches; `action_order` drops the actions of those that do not exist.
"""

from __future__ import annotations

from ..core.plan.schedule import Work


def dualpipev_pattern(position: int, positions: int, num_microbatches: int) -> bytes:
    """Return the pattern of one place under DualPipeV (DeepSeek-V3, section 3.2.1).

    It is that of torch's ``ScheduleDualPipeV``, each forward in front of the backward that it
    overlaps there, for at least 2 P micro-batches, torch's minimum. Backwards are split where that
    fills a bubble: on the way back of the warm-up, and in the second half of the cool-down, whose
    weight parts come last.

    Returns:
        Indices into `KINDS`. Forwards take micro-batches in order, and so do backwards, whole or
        split; weight parts follow their input parts.
    """
    count = max(2 * positions, num_microbatches)
    behind = positions - 1 - position  # places behind this one
    warm_up = (
        bytes([UP]) * (2 * behind)
        + bytes([UP, BACK]) * (position + 1)
        + bytes([BACK_INPUT, BACK_WEIGHT, BACK]) * behind
    )
    steady = bytes([UP, BACK_WHOLE, BACK, UP_WHOLE]) * (count - positions - behind)
    drain = bytes([BACK_WHOLE, BACK, UP_WHOLE]) * behind
    return warm_up + steady + drain + bytes(_cool_down(position, behind))


def _cool_down(position: int, behind: int) -> list[int]:
    """List the last backwards: p + 1 whole ones, then input parts with delayed weight parts."""
    chunks = [1, 0] * (position + 1) + [0] * behind
    pattern: list[int] = []
    weights: list[int] = []
    for number, chunk in enumerate(chunks):
        if number >= 2 * (position + 1):  # no more gradients arrive for chunk 1: a bubble to fill
            pattern.append(weights.pop(0))
        if number <= position:
            pattern.append((UP_WHOLE, BACK_WHOLE)[chunk])
        else:
            pattern.append((UP_INPUT, BACK_INPUT)[chunk])
            weights.append((UP_WEIGHT, BACK_WEIGHT)[chunk])
    return pattern + weights


KINDS = tuple(
    (chunk, work)
    for chunk in (0, 1)
    for work in (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
)
"""Kinds of actions: all work of chunk 0, on the way to the last rank, then of chunk 1, back."""

UP, UP_WHOLE, UP_INPUT, UP_WEIGHT, BACK, BACK_WHOLE, BACK_INPUT, BACK_WEIGHT = range(len(KINDS))


def zbv_pattern(position: int, positions: int, num_microbatches: int) -> bytes:
    """Return the pattern of one place under ZBV (Qi et al. 2023, section 6).

    It is that of torch's ``ScheduleZBVZeroBubble``, for at least 2 P - 1 micro-batches.

    Returns:
        Indices into `KINDS`; each kind takes the micro-batches in order.
    """
    count = max(2 * positions - 1, num_microbatches)
    behind = positions - position  # places from this one to the last, itself included
    warm_up = (
        bytes([UP]) * (2 * behind - 1)
        + bytes([BACK, UP]) * position
        + bytes([BACK, BACK_INPUT, BACK_WEIGHT]) * behind
    )
    steady = bytes([UP_INPUT, UP_WEIGHT, BACK, BACK_INPUT, BACK_WEIGHT])
    cool_down = (
        bytes([UP_INPUT, BACK_INPUT]) * position
        + bytes([UP_INPUT, UP_WEIGHT]) * behind
        + bytes([BACK_WEIGHT]) * position
        + bytes([UP_WEIGHT]) * position
    )
    with_forward = count - (2 * behind - 1 + position)  # forwards the warm-up leaves
    return warm_up + (bytes([UP]) + steady) * with_forward + steady * (behind - 1) + cool_down
