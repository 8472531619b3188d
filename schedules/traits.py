"""Traits of schedules: the facts that planner, validation and service decide by.

The order of work itself is in `action_order`.
"""

from __future__ import annotations

from typing import get_args

from ..core.plan.schedule import TrainingSchedule

NAMES = (*get_args(TrainingSchedule), "forward_only")

ONE_STAGE_A_RANK = ("gpipe", "1f1b", "zero_bubble", "forward_only")
SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")

ANY_REPLICAS = ("gpipe", "1f1b", "forward_only")
"""Schedules whose stages may have different numbers of replicas."""

FOLDED = ("zbv", "dualpipev")
"""Schedules whose stages run to the last place and back (a V): two on each rank."""

IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that take equally many micro-batches through one chunk before they turn to the next."""

SPLIT_BACKWARD = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that send the gradient of a stage's input on before they compute its weights'."""

CLOSED_FORM = ("gpipe", "1f1b", "forward_only")
"""Schedules whose step time has a closed form; the others are judged by the simulated step."""
