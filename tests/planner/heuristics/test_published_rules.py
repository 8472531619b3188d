"""Baselines: each does what the one it stands for does."""

import math
import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.heuristics.published_rules import (
    MAX_PIPEDREAM_DEVICES,
    MAX_PIPEDREAM_SIZE,
    equal_layers,
    equal_parameters,
    pipedream_plan,
    torchgpipe_balance,
)
from stagewright.planner.pipedream.objective import pipedream_chain
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile


def to_cuts(counts):
    cuts = [0]
    for count in counts:
        cuts.append(cuts[-1] + count)
    return cuts


def profile_of(forward_s, parameter_bytes):
    profile = chain_profile(forward_s, forward_bytes=10**6)
    layers = [
        entry.model_copy(
            update={"layer": entry.layer.model_copy(update={"parameter_bytes": size_bytes})}
        )
        for entry, size_bytes in zip(profile.layers, parameter_bytes, strict=True)
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def some_positions(draw, num_layers):
    inner = sorted(draw.sample(range(1, num_layers), draw.randint(0, num_layers - 1)))
    return [0, *inner, num_layers]


@settings(deadline=None)
@given(st.integers(1, 60), st.data())
def test_equal_layers_differ_by_at_most_one_larger_in_front(num_layers, data):
    num_stages = data.draw(st.integers(1, num_layers))
    counts = equal_layers(num_layers, num_stages)
    each, more = divmod(num_layers, num_stages)
    assert counts == [each + 1] * more + [each] * (num_stages - more)


def test_equal_layers_between_positions_are_as_even_as_can_be():
    assert equal_layers(10, 2, [0, 2, 4, 10]) == [4, 6]
    assert equal_layers(10, 3, [0, 1, 2, 7, 8, 10]) == [2, 5, 3]


@pytest.mark.parametrize("seed", range(30))
def test_parameters_are_as_even_as_any_cut_makes_them(seed):
    draw = random.Random(seed)
    num_layers = draw.randint(2, 8)
    sizes = [draw.choice([0, 0, 5, 7, 100]) for _ in range(num_layers)]
    positions = some_positions(draw, num_layers)
    num_stages = draw.randint(1, len(positions) - 1)
    profile = profile_of([1.0] * num_layers, sizes)

    def value(cuts):
        parts = [sum(sizes[first:last]) for first, last in pairwise(cuts)]
        return max(parts), sum(part * part for part in parts)

    cuts = to_cuts(equal_parameters(profile, num_stages, positions))
    assert len(cuts) == num_stages + 1
    assert set(cuts) <= set(positions)
    assert value(cuts) == min(
        value([0, *inner, num_layers]) for inner in combinations(positions[1:-1], num_stages - 1)
    )


def cost_vector(draw):
    num_layers = draw.randint(1, 70)
    shape = draw.choice(["uniform", "lognormal", "whole", "peak", "equal"])
    if shape == "uniform":
        return [draw.uniform(0.5, 1.5) for _ in range(num_layers)]
    if shape == "lognormal":
        return [draw.lognormvariate(0, 2) for _ in range(num_layers)]
    if shape == "whole":
        return [draw.randint(1, 10**6) for _ in range(num_layers)]
    if shape == "equal":
        return [0.25] * num_layers
    costs = [draw.uniform(0.9, 1.1) for _ in range(num_layers)]
    costs[draw.randrange(num_layers)] = draw.uniform(1, 50)
    return costs


@pytest.mark.parametrize("part", range(4))
def test_equals_torchgpipe(part):
    solve = pytest.importorskip("torchgpipe.balance.blockpartition").solve
    for seed in range(500 * part, 500 * (part + 1)):
        draw = random.Random(seed)
        costs = cost_vector(draw)
        num_stages = draw.randint(1, len(costs))
        theirs = [len(block) for block in solve(costs, num_stages)]
        assert torchgpipe_balance(costs, num_stages) == theirs, seed


@pytest.mark.parametrize("seed", range(200))
def test_blocks_never_differ_by_more_than_the_largest_item(seed):
    """Where torchgpipe overlaps blocks or does not return: many costs equal the least."""
    draw = random.Random(seed)
    costs = [float(draw.choice([0, 0, 1, 1, 2])) for _ in range(draw.randint(3, 20))]
    counts = torchgpipe_balance(costs, draw.randint(1, len(costs)))
    assert sum(counts) == len(costs)
    assert min(counts) >= 0
    spread = max(costs) - min(costs)
    parts = [
        sum(cost - min(costs) for cost in costs[first:last])
        for first, last in pairwise(to_cuts(counts))
    ]
    assert max(parts) - min(parts) <= spread


def test_an_empty_block_is_passed_over():
    """torchgpipe 0.0.7 does not return: the first of equally small blocks asks an empty one."""
    counts = torchgpipe_balance([1, 0, 1, 0, 1, 0, 0, 1, 0, 1], 8)
    assert sum(counts) == 10


def test_torchgpipe_between_positions_balances_the_groups():
    costs = [3.0, 1.0, 1.0, 1.0, 4.0, 2.0, 2.0]
    positions = [0, 1, 4, 5, 7]
    assert torchgpipe_balance([3.0, 3.0, 4.0, 4.0], 2) == [3, 1]
    assert torchgpipe_balance(costs, 2, positions) == [5, 2]


def test_pipedream_is_the_chain_search_on_the_profile():
    draw = random.Random(3)
    forward = [draw.uniform(1e-3, 1e-2) for _ in range(9)]
    sizes = [draw.randint(0, 10**8) for _ in range(9)]
    profile = profile_of(forward, sizes)
    counts, replicas = pipedream_plan(profile, 4, 1e9)
    times = [entry.forward.median_s + entry.backward.median_s for entry in profile.layers]
    sent = [boundary.forward_bytes for boundary in profile.boundaries]
    split = pipedream_chain(times, sizes, sent, (4,), (1e9,))
    assert counts == [len(stage.node_ids) for stage in split.stages]
    assert replicas == [stage.replicas for stage in split.stages]
    assert sum(counts) == 9
    assert sum(replicas) == 4
    grouped, _ = pipedream_plan(profile, 4, 1e9, [0, 4, 9])
    assert set(to_cuts(grouped)) <= {0, 4, 9}


def test_pipedream_has_limits():
    profile = chain_profile([1.0] * 100)
    assert pipedream_plan(profile, MAX_PIPEDREAM_DEVICES + 1, 1e9) is None
    assert pipedream_plan(profile, MAX_PIPEDREAM_SIZE // 100 + 1, 1e9) is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda: equal_layers(4, 5),
        lambda: equal_layers(4, 0),
        lambda: equal_layers(4, 3, [0, 2, 4]),
        lambda: equal_layers(4, 2, [0, 2, 2, 4]),
        lambda: equal_layers(4, 2, [0, 2]),
        lambda: equal_layers(4, 2, []),
        lambda: torchgpipe_balance([1.0, 2.0], 3),
        lambda: torchgpipe_balance([1.0, 2.0], 0),
        lambda: torchgpipe_balance([], 1),
        lambda: torchgpipe_balance([1.0, -1.0], 1),
        lambda: torchgpipe_balance([1.0, math.nan], 1),
        lambda: pipedream_plan(chain_profile([1.0] * 4), 0, 1e9),
        lambda: pipedream_plan(chain_profile([1.0] * 4), 2, 0.0),
    ],
)
def test_what_makes_no_sense_is_refused(ask):
    with pytest.raises(InvalidInput):
        ask()


def test_others_plans_of_more_stages_than_microbatches_compete():
    """PipeDream's three stages, under 1F1B with two micro-batches."""
    profile = chain_profile([1e-3] * 3, parameter_bytes=10**7, saved_bytes=1000, forward_bytes=10)
    cluster = Cluster.uniform(3, bandwidth_bytes_per_s=1e9, latency_s=0.0)
    assert pipedream_plan(profile, 3, 1e9, (0, 1, 2, 3)) == ([1, 1, 1], [1, 1, 1])
    for max_replicas in (1, None):
        options = PlanOptions(num_microbatches=2, max_replicas=max_replicas)
        made = plan(profile, cluster, options)
        validate(made, profile, cluster)
        three = plan_from_balance(profile, cluster, options, [1, 1, 1])
        assert made.step_time_s <= three.step_time_s
