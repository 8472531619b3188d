"""A plan draws its own timeline."""

from stagewright.core.cluster import Cluster
from stagewright.planner.plan import plan
from stagewright.planner.timeline import plan_timeline
from tests.builders import chain_profile, random_cluster, random_profile

from .drawing import drawn


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
