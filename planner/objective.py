"""The step time the planner minimises, in closed form.

With stages s, micro-batches m, F and B a stage's forward and backward time, and C the time its
outgoing boundary takes both ways:

- 1f1b: sum (F + B + C) + (m - 1) max (F + B + C) + tied (Alpa, OSDI 2022, section 5.1, with
  each boundary charged to its sender). A model: in random trials without communication it was
  never below the simulated step when B / F was the same everywhere, 0.1 % below at worst for
  B / F between 1.5 and 3, and 15 % below for unrelated F and B; communication mostly puts it
  above. That is why the final choice is the simulator's.
- gpipe: sum (F + B + C) + (m - 1) (max F + max B) + tied. Exact: both phases are flow shops of
  equal jobs with delays between the machines.

So both are: sum of a weight + (m - 1) x sum over metrics of their largest value + tied.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.schedule import ScheduleName
from .cost import StageCosts

OBJECTIVE_NAMES: dict[ScheduleName, str] = {
    "1f1b": "1F1B model step time, sum + (m - 1) x slowest stage",
    "gpipe": "GPipe step time, sum + (m - 1) x (slowest forward + slowest backward)",
}

Time = TypeVar("Time", float, NDArray[np.float64])


def terms(
    schedule: ScheduleName, forward_s: Time, backward_s: Time, communication_s: Time
) -> tuple[Time, tuple[Time, ...]]:
    """A stage's weight, and the metrics whose largest value over the stages counts.

    Args:
        schedule: ``1f1b`` or ``gpipe``.
        forward_s: Of one stage, or an array over many possible stages; likewise the others.
        backward_s: Its backward time.
        communication_s: Time its outgoing boundary takes, both ways.
    """
    weight = forward_s + backward_s + communication_s
    return weight, (forward_s, backward_s) if schedule == "gpipe" else (weight,)


def objective_s(costs: StageCosts, cuts: tuple[int, ...]) -> float:
    """The objective of one split, whether or not it fits."""
    times = costs.stage_times(cuts)
    total_s = 0.0
    largest_s: list[float] = []
    for stage, _ in enumerate(pairwise(cuts)):
        outgoing_s = 0.0
        if stage < len(times.send_forward_s):
            outgoing_s = times.send_forward_s[stage] + times.send_backward_s[stage]
        weight, metrics = terms(
            costs.options.schedule, times.forward_s[stage], times.backward_s[stage], outgoing_s
        )
        total_s += weight
        before = largest_s or [0.0] * len(metrics)
        largest_s = [max(pair) for pair in zip(before, metrics, strict=True)]
    return total_s + (costs.options.num_microbatches - 1) * sum(largest_s) + times.tied_sync_s
