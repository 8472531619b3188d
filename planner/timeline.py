"""The simulated timeline of a plan."""

from __future__ import annotations

from ..core.plan import Plan
from ..core.timeline import Timeline
from .schedules import make_schedule
from .simulate import StageTimes, simulate


def plan_timeline(plan: Plan) -> Timeline:
    """When every action of the plan's step happens, by the plan's own numbers.

    Stages are taken one a rank; replicas are not played apart.
    """
    stages = plan.stages
    times = StageTimes(
        forward_s=[stage.forward_time_s for stage in stages],
        backward_s=[stage.backward_time_s for stage in stages],
        send_forward_s=[stage.send_forward_time_s for stage in stages[:-1]],
        send_backward_s=[stage.send_backward_time_s for stage in stages[1:]],
        tied_sync_s=plan.tied_sync_time_s,
        saved_bytes=[stage.memory.activations_bytes // stage.in_flight for stage in stages],
    )
    return simulate(make_schedule(plan.schedule, len(stages), plan.num_microbatches), times)
