"""Moves of the local search: each is a plan of its own, and none is faster than the plan found."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.assignment import place_stages
from stagewright.planner.plan import plan
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve
from stagewright.planner.solvers.stage_moves import move_devices
from tests.builders import chain_profile, random_profile
from tests.planner.instances import draw_cluster

LEVEL = LinkLevel(name="network", group_size=1, latency_s=1e-5, bandwidth_bytes_per_s=2e9)


def free(profile, cluster, **options):
    return PlanningRequest(profile, cluster, PlanOptions(max_replicas=None, **options))


def on_kinds(seed, **asked):
    """A chain on equally many devices of two speeds."""
    draw = random.Random(seed)
    profile = random_profile(seed, draw.choice([16, 24, 30]), ties=0)
    half, slow = draw.choice([4, 6, 8]), draw.choice([0.4, 0.6, 0.75])
    devices = tuple(
        Device(name=f"{kind}:{index}", kind=kind, speed=speed)
        for kind, speed in (("fast", 1.0), ("slow", slow))
        for index in range(half)
    )
    cluster = Cluster(devices=devices, levels=(LEVEL.model_copy(update={"group_size": 2 * half}),))
    options = {"num_microbatches": draw.choice([8, 16, 32]), **asked}
    return PlanningRequest(profile, cluster, PlanOptions(**options))


def test_devices_move_stages_split_and_merge_by_hand():
    request = free(chain_profile([2, 2, 3, 1]), Cluster.uniform(4), num_microbatches=12)
    start = place_stages((0, 2, 4), (2, 1), request.devices)
    found = {(entry.cuts, entry.replicas) for entry in move_devices(start, request.cost_model)}
    assert found == {
        ((0, 2, 4), (3, 1)),  # the idle device joins
        ((0, 2, 4), (2, 2)),
        ((0, 2, 4), (1, 1)),  # one is left idle
        ((0, 1, 2, 4), (1, 1, 1)),  # the first stage cut in two
        ((0, 2, 3, 4), (2, 1, 1)),  # the second one, half of it on the idle device
        ((0, 4), (3,)),  # both as one, on the devices of both or of one
        ((0, 4), (2,)),
        ((0, 4), (1,)),
    }


def test_kinds_are_exchanged_and_idle_ones_used_by_hand():
    devices = tuple(Device(name=f"{kind}{index}", kind=kind) for kind, index in ("a0", "a1", "b0"))
    cluster = Cluster(devices=devices, levels=(LEVEL.model_copy(update={"group_size": 3}),))
    request = free(chain_profile([1, 1, 1]), cluster, num_microbatches=4)
    start = place_stages((0, 1, 3), (1, 1), request.devices, classes=(0, 1))
    found = {(entry.cuts, entry.classes) for entry in move_devices(start, request.cost_model)}
    assert ((0, 1, 3), (1, 0)) in found  # exchanged
    assert ((0, 1, 3), (0, 0)) in found  # the second stage on an idle device
    assert {((0, 1, 2, 3), (0, 0, 1)), ((0, 1, 2, 3), (0, 1, 0))} <= found  # half of it
    assert {((0, 3), (0,)), ((0, 3), (1,))} <= found


def test_recomputation_stays_with_its_layers():
    request = free(
        chain_profile([1, 1, 1, 1]), Cluster.uniform(4), num_microbatches=8, recompute="auto"
    )
    start = replace(place_stages((0, 2, 4), (2, 2), request.devices), recompute=(True, False))
    for entry in move_devices(start, request.cost_model):
        for stage, (first, last) in enumerate(pairwise(entry.cuts)):
            if last <= 2:
                assert entry.recompute[stage]
            elif first >= 2:
                assert not entry.recompute[stage]


@pytest.mark.parametrize("seed", range(6))
def test_every_stage_keeps_devices_of_its_own(seed):
    asked = on_kinds(seed, schedule="1f1b", num_stages=5, max_replicas=None, recompute="auto")
    chosen = solve(asked).costed.assignment
    found = list(move_devices(chosen, asked.cost_model))
    assert {len(entry.classes) for entry in found} == {4, 5, 6}
    for entry in found:
        used = [
            device
            for stage in range(entry.num_stages)
            for device in entry.device_indices(asked.devices, stage)
        ]
        assert len(set(used)) == len(used) == sum(entry.replicas)
        assert all(first < last for first, last in pairwise(entry.cuts))
        assert entry.cuts[-1] == chosen.cuts[-1]
        assert len(entry.recompute) == entry.num_stages


def none_is_faster(request, made):
    changed = 0
    for entry in move_devices(made.assignment, request.cost_model):
        costed = request.allows(entry) and request.cost_model.evaluate_if_feasible(entry)
        if costed:
            changed += 1
            assert made.step_time_s <= costed.step_time_s * (1 + 1e-9)
    return changed


def test_no_plan_is_slower_than_with_its_devices_moved():
    """Where all are simulated: few stages, few micro-batches."""
    changed = 0
    for seed in range(60):
        draw = random.Random(seed)
        request = free(
            random_profile(seed, draw.randint(3, 7), ties=0),
            Cluster.uniform(draw.randint(3, 7)),
            num_microbatches=draw.randint(3, 12),
        )
        changed += none_is_faster(request, solve(request).costed)
    assert changed > 100


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("seed", range(12))
def test_no_exchange_of_kinds_is_faster(seed, schedule):
    """Annealing found plans up to 3 % faster: kinds stayed where the closed form wants them."""
    request = on_kinds(seed, schedule=schedule, max_replicas=1)
    none_is_faster(request, solve(request).costed)


@pytest.mark.parametrize("seed", [27, 29, 42, 50, 53, 66, 92])
def test_a_plan_for_throughput_has_no_shorter_step(seed):
    """It had, by up to 2 % in these and by 7 % in a user's: the closed form ranked it too low.

    In the last one by 0.5 %: no move changed the devices of plans on two kinds with replicas.
    """
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
