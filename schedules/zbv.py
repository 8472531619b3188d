"""The order of work of the V-shaped zero-bubble schedule."""

from __future__ import annotations

from ..core.schedule import Work

KINDS = tuple(
    (chunk, work)
    for chunk in (0, 1)
    for work in (Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
)
"""What a rank does: on its chunk on the way to the last rank, and on the one on the way back."""


def zbv_pattern(position: int, positions: int, num_microbatches: int) -> tuple[list[int], int]:
    """What the rank at one place of the V does (Qi et al. 2023, section 6).

    As ``ScheduleZBVZeroBubble`` of torch: drawn for at least 2 P - 1 micro-batches; actions on
    those that do not exist are to be left out.

    Returns:
        Indices of `KINDS`, first to last, and for how many micro-batches: each kind takes them
        in order, from the first to the last.
    """
    count = max(2 * positions - 1, num_microbatches)
    behind = positions - position  # places from this one to the last, itself included
    up, up_input, up_weight, back, back_input, back_weight = range(len(KINDS))
    warm_up = (
        [up] * (2 * behind - 1) + [back, up] * position + [back, back_input, back_weight] * behind
    )
    steady = [up_input, up_weight, back, back_input, back_weight]
    cool_down = (
        [up_input, back_input] * position
        + [up_input, up_weight] * behind
        + [back_weight] * position
        + [up_weight] * position
    )
    with_forward = count - (2 * behind - 1 + position)  # forwards the warm-up leaves
    pattern = warm_up + [up, *steady] * with_forward + steady * (behind - 1) + cool_down
    return pattern, count
