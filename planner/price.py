"""What one split costs: by the closed form, and by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import StageCosts
from .objective import objective_s
from .schedules import make_schedule
from .simulate import simulate
from .splits import Cuts


@dataclass(frozen=True)
class Priced:
    """A split with its objective, its simulated step time and its idle share."""

    cuts: Cuts
    objective_s: float
    step_time_s: float
    bubble_fraction: float


def price(costs: StageCosts, cuts: Cuts) -> Priced:
    """Objective and simulated step of one split."""
    options = costs.options
    schedule = make_schedule(options.schedule, len(cuts) - 1, options.num_microbatches)
    timeline = simulate(schedule, costs.stage_times(cuts), with_events=False)
    return Priced(cuts, objective_s(costs, cuts), timeline.step_time_s, timeline.bubble_fraction)


def least_step_time_s(costs: StageCosts, cuts: Cuts) -> float:
    """A bound that no simulated step of this split can beat, in O(stages).

    Every stage waits for the first micro-batch to reach it, works through all of them, and its
    last gradient has to travel back to the front.
    """
    times = costs.stage_times(cuts)
    reach_s = bound_s = 0.0
    for stage, (forward_s, backward_s) in enumerate(
        zip(times.forward_s, times.backward_s, strict=True)
    ):
        work_s = forward_s + backward_s
        bound_s = max(bound_s, reach_s + costs.options.num_microbatches * work_s)
        reach_s += work_s
        if stage < len(times.send_forward_s):
            reach_s += times.send_forward_s[stage] + times.send_backward_s[stage]
    return bound_s + times.tied_sync_s
