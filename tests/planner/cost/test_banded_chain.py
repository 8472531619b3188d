"""Long chains: the stages that could fit cost what the tables of all stages say."""

import random

import numpy as np
import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.banded_chain import band
from stagewright.planner.cost.chain import chain_costs, legal_positions
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.problem import problem as request_module
from stagewright.planner.validation.validate import validate
from tests.builders import random_profile
from tests.planner.instances import Instance, search_alone

OPTIONS = PlanOptions(num_microbatches=8, max_replicas=None, recompute="auto")


def short_enough(seed, memory_bytes):
    profile = random_profile(seed, 14, ties=seed % 3, storages=seed % 4 != 0)
    positions = legal_positions(profile)
    devices = group_devices(Cluster.uniform(4, memory_bytes=memory_bytes), OPTIONS)
    return band(profile, positions, devices, OPTIONS), chain_costs(profile, positions).stages


@pytest.mark.parametrize("seed", range(60))
def test_a_stage_costs_what_the_whole_table_says(seed):
    memory_bytes = random.Random(seed).choice([20_000, 60_000, 10**9])
    found, whole = short_enough(seed, memory_bytes)
    number = {pair: at for at, pair in enumerate(zip(whole.first, whole.last, strict=True))}
    at = [number[pair] for pair in zip(found.first, found.last, strict=True)]
    for name in ("forward_s", "backward_s", "recompute_s"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name)[at], rel=1e-12), name
    for name in (
        "weights_bytes",
        "gradients_bytes",
        "learned_elements",
        "saved_bytes",
        "workspace_bytes",
    ):
        assert np.array_equal(getattr(found, name), getattr(whole, name)[at]), name
    for name in ("arriving_bytes", "returning_bytes", "input_bytes"):
        assert np.array_equal(getattr(found, name), getattr(whole, name)), name
    for name in ("front_forward_s", "front_backward_s"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-12), name
    assert found.whole_s == pytest.approx(whole.whole_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_out_fits_no_device(seed):
    memory_bytes = 60_000
    found, whole = short_enough(seed, memory_bytes)
    kept = set(zip(found.first.tolist(), found.last.tolist(), strict=True))
    resident = whole.weights_bytes + whole.gradients_bytes + 8 * whole.learned_elements
    for pair, size in zip(
        zip(whole.first.tolist(), whole.last.tolist(), strict=True), resident.tolist(), strict=True
    ):
        assert pair in kept or size > memory_bytes


@pytest.mark.parametrize("seed", range(12))
def test_planning_by_the_band_is_as_good_as_by_the_whole_table(seed, monkeypatch):
    profile = random_profile(seed, 14, ties=0)
    cluster = Cluster.uniform(6, memory_bytes=120_000)
    given = Instance(profile, cluster, OPTIONS)
    whole = search_alone(given)
    monkeypatch.setattr(request_module, "MAX_ATOMS", 5)
    found = search_alone(given)
    validate(found.plan, profile, cluster)
    assert found.lower_bound == pytest.approx(whole.lower_bound, rel=1e-9)
    assert found.best_value == pytest.approx(whole.best_value, rel=1e-9)


def test_no_band_without_limits_or_when_it_would_be_too_wide(monkeypatch):
    profile = random_profile(1, 10)
    positions = legal_positions(profile)
    free = group_devices(Cluster.uniform(2), OPTIONS)
    assert band(profile, positions, free, OPTIONS) is None
    roomy = group_devices(Cluster.uniform(2, memory_bytes=10**9), OPTIONS)
    assert band(profile, positions, roomy, OPTIONS) is not None
    monkeypatch.setattr("stagewright.planner.cost.banded_chain.MAX_STAGES", 3)
    assert band(profile, positions, roomy, OPTIONS) is None
