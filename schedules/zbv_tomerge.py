"""The order of work of the V-shaped zero-bubble schedule."""

from __future__ import annotations

from .kinds_tomerge import BACK, BACK_INPUT, BACK_WEIGHT, UP, UP_INPUT, UP_WEIGHT


def zbv_pattern(position: int, positions: int, num_microbatches: int) -> bytes:
    """What the rank at one place of the V does (Qi et al. 2023, section 6).

    As ``ScheduleZBVZeroBubble`` of torch: drawn for at least 2 P - 1 micro-batches; actions on
    those that do not exist are to be left out.

    Returns:
        Indices of `KINDS`, first to last; each kind takes the micro-batches in order.
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
