"""The search finds what brute force finds, and its bound is one."""

import random

import pytest

from stagewright.core.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.graph import Parameter
from stagewright.core.plan import PlanOptions
from stagewright.planner import pipeline
from stagewright.planner.cost import stage_costs
from stagewright.planner.objective import objective_s
from stagewright.planner.pipeline import PipelineSearch
from tests.builders import chain_profile, random_cluster, random_profile, two_level_cluster

from .oracle import least_objective_s, usable_splits


def random_costs(seed, *, uniform=True, max_layers=9, ties=None):
    draw = random.Random(seed)
    num_devices = draw.randrange(1, 6)
    memory = draw.choice([None, 20_000, 40_000, 80_000])
    cluster = (
        random_cluster(seed, num_devices, memory_bytes=memory)
        if uniform
        else two_level_cluster(num_devices, memory_bytes=memory)
    )
    options = PlanOptions(
        num_microbatches=draw.choice([1, 2, 5, 8]),
        schedule=draw.choice(["1f1b", "gpipe"]),
        optimizer=draw.choice(["none", "adam"]),
        memory_fraction=draw.choice([1.0, 0.9]),
    )
    ties = draw.choice([0, 1, 2]) if ties is None else ties
    profile = random_profile(seed, draw.randrange(1, max_layers), ties=ties)
    return stage_costs(profile, cluster, options)


@pytest.mark.parametrize("seed", range(200))
def test_equals_brute_force_and_is_proven(seed):
    costs = random_costs(seed)
    search = PipelineSearch(costs)
    for num_stages in search.stage_counts():
        expected = least_objective_s(costs, num_stages)
        found = search.best_split(num_stages)
        if expected is None:
            assert found.cuts is None
            continue
        assert found.objective_s == pytest.approx(expected, rel=1e-12)
        assert found.objective_s == objective_s(costs, found.cuts)
        assert found.lower_bound_s == pytest.approx(expected, rel=1e-11)
        assert found == search.best_split(num_stages)
        quick = search.best_split(num_stages, exact=False)
        assert quick.lower_bound_s <= expected * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_on_two_link_levels_the_bound_holds_and_without_ties_it_is_met(seed):
    costs = random_costs(seed, uniform=False, ties=seed % 2)
    search = PipelineSearch(costs)
    for num_stages in search.stage_counts():
        expected = least_objective_s(costs, num_stages)
        found = search.best_split(num_stages)
        if expected is None:
            assert found.cuts is None
            continue
        assert found.lower_bound_s <= expected * (1 + 1e-12)
        if not costs.tied:
            assert found.lower_bound_s == pytest.approx(expected, rel=1e-11)
            assert found.objective_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_more_ties_than_are_told_apart_leave_a_valid_bound(schedule):
    profile = random_profile(5, 8, illegal=0)
    tied = [Parameter(names=(f"tied.{index}",), size_bytes=1000 * (index + 1), numel=1,
                      layers=(index, index + 2)) for index in range(6)]  # fmt: skip
    profile = type(profile).model_validate({**dict(profile), "parameters": (*tied,)})
    options = PlanOptions(num_microbatches=4, schedule=schedule)
    costs = stage_costs(profile, Cluster.uniform(4, bandwidth_bytes_per_s=1e5), options)
    search = PipelineSearch(costs)
    for num_stages in search.stage_counts():
        expected = least_objective_s(costs, num_stages)
        found = search.best_split(num_stages)
        assert found.lower_bound_s <= expected * (1 + 1e-12)
        assert found.objective_s >= expected * (1 - 1e-12)


def test_a_tie_can_decide_the_split():
    """Keeping two layers together costs balance; it is done exactly when that is cheaper."""
    profile = chain_profile([1, 1, 1, 1])
    for size_bytes, expected in ((1, (0, 2, 4)), (10**6, (0, 3, 4))):
        tied = Parameter(names=("tied",), size_bytes=size_bytes, numel=1, layers=(0, 2))
        held = type(profile).model_validate({**dict(profile), "parameters": (tied,)})
        cluster = Cluster.uniform(2, latency_s=0, bandwidth_bytes_per_s=1e5)
        costs = stage_costs(held, cluster, PlanOptions(num_microbatches=1 + 2))
        found = PipelineSearch(costs).best_split(2)
        assert found.cuts == expected
        assert found.objective_s == found.lower_bound_s == least_objective_s(costs, 2)


def test_illegal_cuts_are_never_made():
    for seed in range(30):
        profile = random_profile(seed, 8, illegal=0.6)
        costs = stage_costs(profile, Cluster.uniform(8), PlanOptions())
        search = PipelineSearch(costs)
        for num_stages in search.stage_counts():
            cuts = search.best_split(num_stages).cuts
            assert set(cuts[1:-1]) <= set(costs.legal_cuts)


def test_a_search_cut_short_still_has_a_valid_bound(monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_SOLVES", 1)
    gaps = 0
    for seed in range(40):
        costs = random_costs(seed, max_layers=10)
        search = PipelineSearch(costs)
        for num_stages in search.stage_counts():
            found = search.best_split(num_stages)
            if found.cuts is not None:
                expected = least_objective_s(costs, num_stages)
                assert found.lower_bound_s <= expected * (1 + 1e-12)
                assert found.objective_s >= expected * (1 - 1e-12)
                gaps += found.lower_bound_s < found.objective_s * (1 - 1e-9)
    assert gaps, "no search was cut short; the test checks nothing"


def test_smallest_excess_is_that_of_the_best_split():
    for seed in range(40):
        costs = random_costs(seed)
        search = PipelineSearch(costs)
        for num_stages in search.stage_counts():
            fits = any(True for _ in usable_splits(costs, num_stages))
            path = search.smallest_excess(num_stages)
            assert (path.value <= 0) == fits


def test_stage_counts_asked_for_and_not_to_be_had():
    profile = chain_profile([1, 1, 1])
    with pytest.raises(Infeasible, match="4 stages need 4 devices, the cluster has 2") as caught:
        _counts(profile, 2, 4)
    assert (caught.value.constraint, caught.value.required, caught.value.available) == (
        "devices", 4, 2,
    )  # fmt: skip
    with pytest.raises(Infeasible, match="at most 3 stages") as caught:
        _counts(profile, 8, 4)
    assert caught.value.constraint == "legal_cuts"
    assert _counts(profile, 8, 2) == [2]
    assert _counts(profile, 8, None) == [1, 2, 3]


def test_1f1b_takes_as_many_stages_as_microbatches_and_gpipe_any():
    """The runtime's Schedule1F1B refuses more; such a plan once was called optimal."""
    profile = chain_profile([1] * 6)
    assert _counts(profile, 6, None, num_microbatches=4) == [1, 2, 3, 4]
    assert _counts(profile, 6, 4, num_microbatches=4) == [4]
    for num_devices in (6, 2):
        with pytest.raises(InvalidInput, match=r"5 stages, but num_microbatches is 4;") as caught:
            _counts(profile, num_devices, 5, num_microbatches=4)
        assert "ask for num_microbatches=5 or more, or for the gpipe schedule" in str(caught.value)
        assert caught.value.field == "/options/num_stages"
    gpipe = {"num_microbatches": 1, "schedule": "gpipe"}
    assert _counts(profile, 6, None, **gpipe) == [1, 2, 3, 4, 5, 6]
    assert _counts(profile, 6, 6, **gpipe) == [6]


def _counts(profile, num_devices, num_stages, **fields):
    options = PlanOptions(num_stages=num_stages, **fields)
    return PipelineSearch(
        stage_costs(profile, Cluster.uniform(num_devices), options)
    ).stage_counts()
