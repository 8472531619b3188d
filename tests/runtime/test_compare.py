"""A recorded step against its plan: what was mispredicted is named, and the profile corrected."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Reconciliation, Timing
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.simulator.durations import StageTimes
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.planner.simulator.simulate import simulate
from stagewright.runtime.compare import compare, corrected
from stagewright.schedules.plan_schedule import schedule_of
from tests.builders import chain_profile

PROFILE = chain_profile([1e-3, 2e-3, 1e-3, 3e-3], forward_bytes=4_000_000)


def planned(schedule="1f1b", **options):
    options = PlanOptions(num_microbatches=6, schedule=schedule, **options)
    return plan_from_balance(PROFILE, Cluster.uniform(2), options, [2, 2])


def lasting(plan, *, forward=1.0, send=1.0):
    """The plan's step, had stage 1's forward and all messages taken so many times as long."""
    stages = plan.stages
    times = StageTimes(
        forward_s=[stages[0].forward_time_s, stages[1].forward_time_s * forward],
        backward_s=[stage.backward_time_s for stage in stages],
        send_forward_s=[stages[0].send_forward_time_s * send],
        send_backward_s=[stages[1].send_backward_time_s * send],
    )
    return simulate(schedule_of(plan), times)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_step_as_planned_is_not_off(schedule):
    plan = planned(schedule)
    found = compare(plan, plan_timeline(plan))
    for each in (found.step, *found.stages, *found.links):
        assert each.measured_s == pytest.approx(each.predicted_s), each.what


def test_the_stage_that_took_longer_is_named_and_its_layers_corrected():
    plan = planned()
    found = compare(plan, lasting(plan, forward=2.0))
    assert found.worst.what == "stage 1 forward"
    assert found.worst.excess_s == pytest.approx(4e-3)
    assert "largest difference: stage 1 forward, 4 ms longer" in str(found)
    right = corrected(PROFILE, plan, found)
    assert [entry.forward.median_s for entry in right.layers] == pytest.approx(
        [1e-3, 2e-3, 2e-3, 6e-3]
    )
    assert [entry.backward.median_s for entry in right.layers] == pytest.approx(
        [entry.backward.median_s for entry in PROFILE.layers]
    )


def test_a_corrected_profile_says_nothing_of_a_whole_model_measured_before():
    """It showed the old time of the whole model, and how far the old sum was from it."""
    one = Timing(median_s=1.0)
    whole = Reconciliation(whole_forward=one, whole_backward=one, relative_error=0.013)
    plan = planned()
    found = compare(plan, lasting(plan, forward=2.0))
    right = corrected(PROFILE.model_copy(update={"reconciliation": whole}), plan, found)
    assert "the whole model took" not in str(right)
    assert any("corrected by a recorded step" in note for note in right.notes)


def test_the_link_that_took_longer_is_named():
    plan = planned()
    found = compare(plan, lasting(plan, send=50.0))
    assert found.worst.what in ("stage 0 to 1", "stage 1 back to 0")
    assert found.worst.measured_s == pytest.approx(50 * found.worst.predicted_s)


def test_a_step_of_another_plan_is_refused():
    other = PlanOptions(num_microbatches=5)
    other = plan_from_balance(PROFILE, Cluster.uniform(2), other, [2, 2])
    with pytest.raises(InvalidInput, match="5 micro-batches, the plan 2 and 6"):
        compare(planned(), plan_timeline(other))
    with pytest.raises(InvalidInput, match="pass the profile that was planned from"):
        corrected(chain_profile([1e-3] * 3), planned(), compare(planned(), lasting(planned())))
