"""What one split costs: by the closed form, and by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import StageCosts
from .objective import objective_s
from .schedules import in_flight, make_schedule
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

    Every stage q waits for the first micro-batch to reach it, works through all m, and its last
    gradient has to travel back to the front: sum of t over s < q, plus m t_q, t = F + B. The
    first backward can begin only X after its forward, X the way to the last stage and back, and
    meanwhile q has only the d - 1 other forwards of its warm-up to do; so it idles at least
    X - (d - 1) F. At the end likewise X - (d - 1) B, a second wait only if m > d.
    """
    times, options = costs.stage_times(cuts), costs.options
    work_s = [sum(pair) for pair in zip(times.forward_s, times.backward_s, strict=True)]
    sends = [sum(pair) for pair in zip(times.send_forward_s, times.send_backward_s, strict=True)]
    way_s = sum(work_s) + sum(sends)  # from this stage's forward on, to the end and back
    reach_s = bound_s = 0.0
    for stage, (stage_s, send_s) in enumerate(zip(work_s, [*sends, 0.0], strict=True)):
        way_s -= stage_s
        held = in_flight(options.schedule, stage, len(work_s), options.num_microbatches)
        idle_s = max(0.0, way_s - (held - 1) * times.forward_s[stage])
        if options.num_microbatches > held:
            idle_s += max(0.0, way_s - (held - 1) * times.backward_s[stage])
        bound_s = max(bound_s, reach_s + options.num_microbatches * stage_s + idle_s)
        reach_s += stage_s + send_s
        way_s -= send_s
    return bound_s + times.tied_sync_s
