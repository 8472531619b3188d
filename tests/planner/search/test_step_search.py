"""The search for the least simulated step against every plan there is."""

import pytest

from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers import step_proof
from stagewright.planner.solvers.solve import solve
from tests.planner.instances import instance, wide_instance
from tests.planner.oracle import usable_plans


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_and_none_below_the_bound(seed):
    draw = instance if seed % 2 else wide_instance
    found = draw(seed, objective="step_time")
    try:
        request = PlanningRequest(found.profile, found.cluster, found.options)
        decision = solve(request)
    except (Infeasible, InvalidInput):
        return
    steps = [split.step_time_s() for split in usable_plans(found)]
    assert decision.costed.step_time_s == pytest.approx(min(steps), rel=1e-9)
    assert decision.simulated_bound_s <= min(steps) * (1 + 1e-9)
    assert step_proof.is_supported(request)


def test_a_search_given_up_keeps_its_bound(monkeypatch):
    found = wide_instance(8, objective="step_time", schedule="1f1b", num_microbatches=8)
    request = PlanningRequest(found.profile, found.cluster, found.options)
    whole = solve(request)
    monkeypatch.setattr(step_proof, "MAX_PAIRS", 0)
    short = solve(request)
    assert short.simulated_bound_s <= whole.costed.step_time_s * (1 + 1e-9)
    assert short.costed.step_time_s >= whole.costed.step_time_s * (1 - 1e-9)
