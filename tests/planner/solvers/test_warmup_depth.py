"""Warm-up depths stage by stage."""

import math
import random

import pytest

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.errors import Infeasible, PlanMismatch
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.assignment import place_stages
from stagewright.planner.cost.chain import chain_costs, legal_positions
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.cost.plan_cost import CostModel
from stagewright.planner.plan import plan
from stagewright.planner.solvers import warmup_depth as warm_up
from stagewright.planner.validation.validate import validate
from stagewright.schedules.action_order import check_depths, default_depths
from tests.builders import chain_profile, random_cluster, random_profile
from tests.planner.instances import draw_cluster


def nodes(memory_bytes=None):
    """Two nodes of two devices; between them a message takes as long as a stage's forward."""
    inside = LinkLevel(group_size=2, latency_s=0.0, bandwidth_bytes_per_s=1e15)
    between = LinkLevel(group_size=4, latency_s=1.0, bandwidth_bytes_per_s=1e15)
    devices = tuple(
        device.model_copy(update={"memory_bytes": memory_bytes})
        for device in Cluster.uniform(4).devices
    )
    return Cluster(devices=devices, levels=(inside, between))


PROFILE = chain_profile([1] * 4, [1] * 4, forward_bytes=1, saved_bytes=1000)
"""A layer a stage; no weights, so memory is micro-batches in flight and a few bytes received."""


def options(extra):
    return PlanOptions(
        num_stages=4, num_microbatches=16, max_extra_in_flight=extra, optimizer="none"
    )


def planned(cluster, extra, profile=PROFILE):
    made = plan(profile, cluster, options(extra))
    validate(made, profile, cluster)
    return made


def depths(made):
    return tuple(stage.in_flight for stage in made.stages)


def uniform_s(cluster, extra):
    """The step with as many more on every stage but the last, if that fits."""
    asked = options(extra)
    devices = group_devices(cluster, asked)
    cost_model = CostModel(chain_costs(PROFILE, legal_positions(PROFILE)), devices, asked)
    one = place_stages((0, 1, 2, 3, 4), (1,) * 4, devices)
    more = one.__class__(**{**vars(one), "extra_depths": (extra,) * 3 + (0,)})
    costed = cost_model.evaluate_if_feasible(more)
    return costed.step_time_s if costed else math.inf


def test_each_stage_runs_as_far_ahead_as_helps_and_fits():
    """5 micro-batches fit a device: on every stage one more, but on the second alone two."""
    tight = nodes(memory_bytes=5_900)
    plain_s, deep = planned(tight, 0).step_time_s, planned(tight, 4)
    best_uniform_s = min(uniform_s(tight, extra) for extra in range(5))
    assert best_uniform_s == uniform_s(tight, 1) < plain_s
    assert math.isinf(uniform_s(tight, 2))
    assert deep.step_time_s < 0.85 * best_uniform_s
    assert depths(deep)[0] == 5
    assert len({mine - own for mine, own in zip(depths(deep), (4, 3, 2, 1), strict=True)}) > 1
    roomy = planned(nodes(), 4)
    assert roomy.step_time_s <= deep.step_time_s
    assert roomy.step_time_s < 0.85 * min(uniform_s(nodes(), extra) for extra in range(5))


def test_no_more_are_in_flight_than_help():
    silent = chain_profile([1] * 4, [1] * 4, saved_bytes=1000)
    assert depths(planned(nodes(), 4, silent)) == (4, 3, 2, 1)
    roomy = planned(nodes(), 8)
    for stage in range(3):
        for fewer in range(1, depths(roomy)[stage]):
            less = list(depths(roomy))
            less[stage] = fewer
            if tuple(less) >= (4, 3, 2, 1) and fewer >= 4 - stage:
                other = roomy.model_copy(update={"stages": with_depths(roomy, less)})
                with pytest.raises(PlanMismatch, match=r"simulated|for ever"):
                    validate(other, PROFILE, nodes())


def with_depths(made, chosen):
    stages = []
    for stage, depth in zip(made.stages, chosen, strict=True):
        memory = stage.memory.model_copy(
            update={"activations_bytes": stage.memory.activations_bytes // stage.in_flight * depth}
        )
        stages.append(stage.model_copy(update={"in_flight": depth, "memory": memory}))
    return tuple(stages)


def test_only_allowed_depths_are_valid():
    made = planned(nodes(), 2)
    for chosen, fault in (
        ((7, 5, 4, 1), "stage 0: in_flight is 7, outside 4 to 6"),
        ((3, 3, 2, 1), "stage 0: in_flight is 3, outside 4 to 6"),
        ((5, 4, 3, 2), "stage 3: in_flight is 2, outside 1 to 1"),
        ((4, 5, 2, 1), "deadlock: stage 1 needs 5 micro-batches"),
    ):
        with pytest.raises(PlanMismatch, match=fault):
            validate(
                made.model_copy(update={"stages": with_depths(made, chosen)}), PROFILE, nodes()
            )


@pytest.mark.parametrize("seed", range(25))
def test_random_plans_hold_and_are_no_slower(seed):
    profile = random_profile(seed, 7)
    cluster = random_cluster(seed, 4, memory_bytes=[None, 60_000, 120_000][seed % 3])
    asked = {"num_microbatches": 9, "max_replicas": [1, None][seed % 2], "recompute": "auto"}
    try:
        plain = plan(profile, cluster, PlanOptions(**asked))
    except Infeasible:
        return
    deep = plan(profile, cluster, PlanOptions(**asked, max_extra_in_flight=5))
    validate(deep, profile, cluster)
    assert deep.step_time_s <= plain.step_time_s * (1 + 1e-9)
    replicas = [stage.replicas for stage in deep.stages]
    assert check_depths(9, replicas, depths(deep)) == depths(deep)
    own = default_depths(9, replicas)
    assert all(0 <= mine - least <= 5 for mine, least in zip(depths(deep), own, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_no_stage_waits_for_more_than_those_in_front_let_through(seed):
    """The front has room for one more, the others for many: all candidates can be run."""
    made = chain_profile([1] * 4, [1] * 4, forward_bytes=1, saved_bytes=1000)
    front = made.storages[seed % 2].model_copy(update={"size_bytes": 5000})
    profile = made.model_copy(
        update={"storages": tuple(front if s.layers == front.layers else s for s in made.storages)}
    )
    cluster, asked = nodes(memory_bytes=26_000), options(8)
    cost_model = CostModel(
        chain_costs(profile, legal_positions(profile)), group_devices(cluster, asked), asked
    )
    one = place_stages((0, 1, 2, 3, 4), (1,) * 4, group_devices(cluster, asked))
    for wanted in ([seed] * 4, [8] * 4, [1, 8, 2, 8], [0, 3, 8, 0]):
        found = warm_up._with(cost_model, one, wanted)
        chosen = cost_model.depths(found)
        assert check_depths(16, (1,) * 4, chosen) == chosen
        assert cost_model.evaluate_if_feasible(found) is not None


@pytest.mark.parametrize("seed", [32, 74, 95])
def test_stages_changed_one_by_one_beat_all_at_once(seed, monkeypatch):
    """By 2 to 5 %."""
    draw = random.Random(seed)
    profile = random_profile(seed, draw.choice([6, 10, 20]), ties=0)
    cluster = draw_cluster(draw, draw.choice([3, 4, 6, 8]))
    draw.choice(range(4))
    asked = PlanOptions(
        num_microbatches=draw.choice([8, 16, 32]),
        max_replicas=draw.choice([1, 1, 2]),
        max_extra_in_flight=draw.choice([2, 5, 8]),
        optimizer="sgd",
    )
    one_by_one = plan(profile, cluster, asked)
    monkeypatch.setattr(warm_up, "_change_depths", lambda *_: iter(()))
    assert one_by_one.step_time_s < 0.98 * plan(profile, cluster, asked).step_time_s
