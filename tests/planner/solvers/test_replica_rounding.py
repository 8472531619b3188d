"""A last stage has whole groups of devices where that is as good, and nothing else changes."""

import math
import random
from dataclasses import replace

import pytest

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.assignment import place_stages
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.staged_search import PlanPool, round_up_replicas
from stagewright.planner.validation.reference_placement import StagePlacement
from tests.builders import chain_profile, random_profile


def fours(num_devices, memory_bytes=None):
    """Groups of four, the last of which may be partial."""
    levels = tuple(
        LinkLevel(group_size=size, latency_s=0.0, bandwidth_bytes_per_s=1e9) for size in (4, 160)
    )
    return Cluster(
        devices=Cluster.uniform(num_devices, memory_bytes=memory_bytes).devices, levels=levels
    )


def start_of(cluster, replicas, **asked):
    """A request, and a plan of it with so many replicas."""
    options = PlanOptions(**{"num_microbatches": 40, "max_replicas": None, **asked})
    profile = chain_profile([1] * 4, saved_bytes=100)
    request = PlanningRequest(profile, cluster, options)
    return request, place_stages((0, 1, 4), replicas, request.devices)


def test_a_last_stage_takes_the_rest_of_its_group():
    request, start = start_of(fours(12), (4, 5))
    found = round_up_replicas(start, request.cost_model)
    assert found == replace(start, replicas=(4, 8), ends=(4, 12))
    assert round_up_replicas(found, request.cost_model) is found


@pytest.mark.parametrize(
    ("cluster", "replicas", "asked"),
    [
        (fours(12), (4, 3), {}),  # it lies inside a group
        (fours(11), (4, 5), {}),  # there is no rest
        (fours(12), (4, 5), {"max_replicas": 7}),
        (fours(12), (4, 5), {"num_microbatches": 7}),
        (fours(12), (4, 5), {"objective": "devices"}),
    ],
)
def test_it_stays_where_that_is_no_plan_or_a_worse_one(cluster, replicas, asked):
    request, start = start_of(cluster, replicas, **asked)
    assert round_up_replicas(start, request.cost_model) is start


@pytest.mark.parametrize(("memory_bytes", "is_filled"), [(400, False), (499, False), (500, True)])
def test_it_stays_where_a_stage_in_front_would_not_fit(memory_bytes, is_filled):
    """With five replicas behind two, 1 + ceil(5 / 2) micro-batches of 100 bytes are in flight."""
    request, start = start_of(fours(12, memory_bytes), (2, 5))
    assert request.cost_model.fits(request.cost_model.stages(start), start)
    assert (round_up_replicas(start, request.cost_model) != start) == is_filled


def test_plans_found_are_played_as_equal_pipelines():
    """The simulator plays one of them: for a last stage of 43,691 replicas it played 262,144
    micro-batches, where 43,696 were as good and an eighth of these enough.
    """
    for objective, number in (("step_time", 4), ("throughput", 4), ("devices", 1)):
        request, start = start_of(fours(12), (4, 5), objective=objective)
        pool = PlanPool(request.cost_model)
        pool.add(start, 1.0)
        pool.add(round_up_replicas(start, request.cost_model), 1.01)
        best = pool.best(2)
        assert math.gcd(*best[0].replicas) == number
        assert len(best) == len(set(best))


def test_a_plan_on_whole_groups_is_no_worse():
    """Any number of a last stage's replicas, on nested groups and links of any speed."""
    changed = 0
    for seed in range(40):
        draw = random.Random(seed)
        sizes = draw.choice([(4,), (2, 4), (3, 6), (2, 6)])
        levels = tuple(
            LinkLevel(
                group_size=size, latency_s=1e-6, bandwidth_bytes_per_s=10 ** draw.uniform(5, 8)
            )
            for size in (*sizes, 24)
        )
        cluster = Cluster(devices=Cluster.uniform(24).devices, levels=levels)
        profile = random_profile(seed, 5, illegal=0)
        request = PlanningRequest(
            profile, cluster, PlanOptions(num_microbatches=48, max_replicas=None))  # fmt: skip
        start = place_stages((0, 2, 5), (sizes[-1], draw.randrange(1, 18)), request.devices)
        if start is None:
            continue
        cost_model = request.cost_model
        found = round_up_replicas(start, cost_model)
        place = StagePlacement(cluster, found.device_indices(request.devices, 1))
        assert not list(place.faults()), seed
        assert cost_model.evaluate(found).value <= cost_model.evaluate(start).value, seed
        changed += found != start
    assert changed > 10
