"""A plan draws its own timeline."""

from stagewright.core.cluster.cluster import Cluster
from stagewright.planner.plan import plan
from stagewright.planner.simulator.plan_timeline import plan_timeline
from tests.builders import chain_profile, random_cluster, random_profile
from tests.planner.drawing import drawn


def with_stages(made, *changes, **fields):
    """A plan with some fields of its stages replaced, and of its own."""
    stages = [{**dict(stage), **change} for stage, change in zip(made.stages, changes, strict=True)]
    return type(made).model_validate({**dict(made), "stages": stages, **fields})


def test_has_the_plans_step_time_bubble_and_memory():
    for seed in range(20):
        made = plan(random_profile(seed, 8), random_cluster(seed, 4))
        timeline = plan_timeline(made)
        assert timeline.step_time_s == made.step_time_s
        assert timeline.bubble_fraction == made.bubble_fraction
        assert timeline.peak_activation_bytes == tuple(
            stage.memory.activations_bytes for stage in made.stages
        )


def test_drawn_by_hand():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2), num_microbatches=2)
    assert drawn(plan_timeline(made)) == [
        "F0 F1 .. .. B0 B0 .. B1 B1",
        ".. F0 B0 B0 F1 B1 B1 .. ..",
    ]


def test_replicas_are_ranks_of_their_own():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2), num_microbatches=4)
    replicated = with_stages(
        made,
        {"replicas": 2, "devices": ("device:0", "device:2"), "in_flight": 2, "sync_time_s": 3.0},
        {"in_flight": 1},
    )
    timeline = plan_timeline(replicated)
    assert drawn(timeline) == [
        "F0 F2 .. .. B0 B0 .. .. .. .. B2 B2 .. .. .. .. .. ..",
        "F1 F3 .. .. .. .. .. B1 B1 .. .. .. .. B3 B3 .. .. ..",
        ".. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. .. ..",
    ]


def test_several_stages_on_a_device():
    made = plan(chain_profile([1, 1, 1, 1]), Cluster.uniform(4), num_microbatches=4)
    changes = [{"devices": (f"device:{stage % 2}",)} for stage in range(4)]
    looped = with_stages(made, *changes, schedule="looped_bfs", chunks=2)
    assert [row[:47] for row in drawn(plan_timeline(looped), stages=True)] == [
        "0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 ... ... ... 2B3",
        "... 1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B3 3B2",
    ]


def test_depths_are_the_plans_own():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2), num_microbatches=3)
    deeper = with_stages(made, {"in_flight": 3}, {"in_flight": 1})
    assert drawn(plan_timeline(deeper))[0].startswith("F0 F1 F2 ..")
