"""The schedule of a plan: its depths, replicas and chunks, and what it recomputes."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.schedules.make_schedule import make_schedule
from stagewright.schedules.plan_schedule import schedule_of
from stagewright.schedules.validate import validate
from tests.builders import chain_profile


def planned(num_stages, num_microbatches, **options):
    wanted = PlanOptions(num_stages=num_stages, num_microbatches=num_microbatches, **options)
    return plan(chain_profile([1] * num_stages), Cluster.uniform(num_stages), wanted)


def changed(made, *changes):
    stages = [{**dict(stage), **change} for stage, change in zip(made.stages, changes, strict=True)]
    return type(made).model_validate({**dict(made), "stages": stages})


def rows(schedule):
    return [" ".join(map(str, row)) for row in schedule.ranks]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_without_recomputation_it_is_the_one_of_that_name(name):
    assert schedule_of(planned(3, 4, schedule=name)) == make_schedule(name, 3, 4)


def test_depths_are_the_plans_own():
    deeper = changed(planned(2, 4), {"in_flight": 4}, {"in_flight": 2})
    assert schedule_of(deeper) == make_schedule("1f1b", 2, 4, depths=(4, 2))


def test_chunks_and_replicas_are_the_plans_own():
    options = PlanOptions(schedule="looped_bfs", num_stages=4, num_microbatches=4)
    looped = plan(chain_profile([1] * 4), Cluster.uniform(2), options)
    assert schedule_of(looped) == make_schedule("looped_bfs", 4, 4, chunks=2)
    replicated = changed(
        planned(2, 4),
        {"replicas": 2, "devices": ("device:0", "device:2"), "in_flight": 2},
        {"in_flight": 1},
    )
    assert schedule_of(replicated) == make_schedule("1f1b", 2, 4, replicas=(2, 1))


def test_recomputation_stands_right_before_the_backward():
    made = changed(planned(2, 2), {"recompute": "always"}, {})
    assert rows(schedule_of(made)) == ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1"]
    validate(schedule_of(made))


def test_the_last_microbatch_of_each_replica_is_kept_under_except_last():
    made = changed(
        planned(2, 3),
        {"recompute": "except_last"},
        {"recompute": "except_last", "replicas": 2, "devices": ("a", "b"), "in_flight": 1},
    )
    assert rows(schedule_of(made)) == [
        "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0B2",
        "1F0 1R0 1B0 1F2 1B2",
        "1F1 1B1",
    ]


def test_split_backwards_recompute_before_the_input_part():
    made = changed(planned(2, 2, schedule="zero_bubble"), {}, {"recompute": "always"})
    assert rows(schedule_of(made))[1] == "1F0 1R0 1I0 1F1 1R1 1I1 1W0 1W1"


def test_a_forward_alone_recomputes_nothing():
    latency = changed(planned(2, 1, objective="latency"), {"recompute": "always"}, {})
    assert rows(schedule_of(latency)) == ["0F0", "1F0"]
