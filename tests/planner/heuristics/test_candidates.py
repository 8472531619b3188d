"""Changes of a plan that compete with it: each is a plan of its own, of the kind it says."""

import random
from dataclasses import replace

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.assignment import place_stages
from stagewright.planner.heuristics.candidates import reshape_stages
from stagewright.planner.plan import plan
from stagewright.planner.problem.problem import PlanningRequest
from tests.builders import chain_profile, random_profile


def _request(profile, cluster, **options):
    return PlanningRequest(profile, cluster, PlanOptions(max_replicas=None, **options))


def test_devices_move_stages_split_and_merge_by_hand():
    request = _request(chain_profile([2, 2, 3, 1]), Cluster.uniform(4), num_microbatches=12)
    start = place_stages((0, 2, 4), (2, 1), request.devices)
    found = {(entry.cuts, entry.replicas) for entry in reshape_stages(start, request.cost_model)}
    assert found == {
        ((0, 2, 4), (3, 1)),  # the idle device joins
        ((0, 2, 4), (2, 2)),
        ((0, 2, 4), (1, 1)),  # one is left idle
        ((0, 2, 4), (1, 2)),  # one changes sides
        ((0, 1, 2, 4), (1, 1, 1)),  # the first stage cut in two
        ((0, 4), (3,)),  # both as one
    }


def test_recomputation_stays_with_its_layers():
    request = _request(
        chain_profile([1, 1, 1, 1]), Cluster.uniform(4), num_microbatches=8, recompute="auto"
    )
    start = replace(place_stages((0, 2, 4), (2, 2), request.devices), recompute=(True, False))
    for entry in reshape_stages(start, request.cost_model):
        for stage, (first, last) in enumerate(zip(entry.cuts, entry.cuts[1:], strict=False)):
            if last <= 2:
                assert entry.recompute[stage]
            elif first >= 2:
                assert not entry.recompute[stage]


def test_no_plan_is_slower_than_itself_reshaped():
    """Where all are played: few stages, few micro-batches."""
    changed = 0
    for seed in range(60):
        draw = random.Random(seed)
        request = _request(
            random_profile(seed, draw.randint(3, 7), ties=0),
            Cluster.uniform(draw.randint(3, 7)),
            num_microbatches=draw.randint(3, 12),
        )
        found = plan(request.profile, request.cluster, request.options)
        counts = [len(stage.devices) for stage in found.stages]
        cuts = (0, *(sum(found.balance[: index + 1]) for index in range(found.num_stages)))
        start = place_stages(cuts, counts, request.devices)
        for entry in reshape_stages(start, request.cost_model):
            if request.allows(entry):
                changed += 1
                other = request.cost_model.evaluate(entry)
                assert other.step_time_s >= found.step_time_s * (1 - 1e-9), seed
    assert changed > 100
