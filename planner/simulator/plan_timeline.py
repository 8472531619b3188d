"""The simulated timeline of a plan."""

from __future__ import annotations

from ...core.plan.plan import Plan
from ...core.plan.timeline import Timeline
from ...schedules.action_order import make_order
from ...schedules.plan_schedule import schedule_of
from .durations import skip_times
from .rows import StepRows
from .simulate import StageTimes, simulate, simulate_rows


def plan_timeline(plan: Plan) -> Timeline:
    """Simulate a plan's step from the times the plan states.

    Every replica is a separate rank. A recomputation is shown with the size of the stage's
    workspace, where a plan counts it, and the length of its forward: a plan states only the time
    of recomputation and backward together.
    """
    return simulate(schedule_of(plan), times_of(plan))


def plan_rows(plan: Plan) -> StepRows:
    """Return the events and memory of `plan_timeline` as plain rows."""
    stages = plan.stages
    if any(stage.recomputes_whole for stage in stages):
        return simulate_rows(schedule_of(plan), times_of(plan))
    depths = [stage.in_flight for stage in stages] if plan.schedule == "1f1b" else ()
    replicas = [stage.replicas for stage in stages]
    order = make_order(plan.schedule, plan.num_microbatches, replicas, depths, plan.chunks)
    return simulate_rows(order, times_of(plan))


def times_of(plan: Plan) -> StageTimes:
    """Return the durations that a plan states."""
    stages = plan.stages
    recomputes = [stage.recomputes_whole for stage in stages]
    inputs_s = [stage.backward_input_time_s for stage in stages]
    parts = [
        (inputs, stage.backward_time_s - inputs)
        for stage, inputs in zip(stages, inputs_s, strict=True)
        if inputs is not None
    ]
    return StageTimes(
        forward_s=[stage.forward_time_s for stage in stages],
        backward_s=[stage.backward_time_s for stage in stages],
        send_forward_s=[stage.send_forward_time_s for stage in stages[:-1]],
        send_backward_s=[stage.send_backward_time_s for stage in stages[1:]],
        tied_sync_s=plan.tied_sync_time_s,
        saved_bytes=[stage.memory.activations_bytes // stage.in_flight for stage in stages],
        recomputed_bytes=[
            stage.memory.workspace_bytes * again
            for stage, again in zip(stages, recomputes, strict=True)
        ],
        backward_input_s=[inputs for inputs, _ in parts],
        backward_weight_s=[weights for _, weights in parts],
        recompute_s=[
            min(stage.forward_time_s, stage.backward_time_s / 2) * again
            for stage, again in zip(stages, recomputes, strict=True)
        ],
        sync_s=[stage.sync_time_s for stage in stages],
        forward_channel=plan.forward_channels,
        backward_channel=plan.backward_channels,
        skips=skip_times(plan.direct_sends),
    )
