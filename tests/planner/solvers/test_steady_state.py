"""Plans that are fastest in steady state compete for the fastest step."""

import random

import pytest

from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.step_time import steady_state_candidates
from tests.builders import random_profile
from tests.planner.instances import draw_cluster

MIXED = pytest.mark.xfail(
    reason="a node with both kinds leaves one device of its kind for the end of the class, and the "
    "candidates miss a plan whose step is 0.5 % shorter"
)


@pytest.mark.parametrize("seed", [27, 29, 42, 50, 53, 66, pytest.param(92, marks=MIXED)])
def test_a_plan_for_throughput_has_no_shorter_step(seed):
    """It had, by up to 2 % in these and by 7 % in a user's: the closed form ranked it too low."""
    draw = random.Random(seed)
    profile = random_profile(seed, draw.choice([8, 16, 30, 60]), ties=0)
    cluster = draw_cluster(draw, draw.choice([4, 6, 8, 12, 16]))
    asked = {
        "num_microbatches": draw.choice([4, 16, 64]),
        "max_replicas": None,
        "schedule": draw.choice(["1f1b", "1f1b", "gpipe"]),
    }
    made = plan(profile, cluster, PlanOptions(**asked))
    other = plan(profile, cluster, PlanOptions(**asked, objective="throughput"))
    assert made.step_time_s <= other.step_time_s * (1 + 1e-9)
    request = PlanningRequest(profile, cluster, PlanOptions(**asked))
    for entry in steady_state_candidates(request):
        costed = request.cost_model.evaluate_if_feasible(entry)
        assert costed is None or made.step_time_s <= costed.step_time_s * (1 + 1e-9)
