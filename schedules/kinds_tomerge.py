"""What a rank of a V-shaped schedule does on its two stages."""

from __future__ import annotations

from ..core.plan.schedule import Work

KINDS = tuple(
    (chunk, work)
    for chunk in (0, 1)
    for work in (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
)
"""Work on the stage on the way to the last rank (chunk 0), then on the one on the way back."""

UP, UP_WHOLE, UP_INPUT, UP_WEIGHT, BACK, BACK_WHOLE, BACK_INPUT, BACK_WEIGHT = range(len(KINDS))
