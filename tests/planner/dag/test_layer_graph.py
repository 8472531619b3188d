"""Models with branches against brute force over every order of their layers."""

import math

import numpy as np
import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.dag import layer_graph as branches_module
from stagewright.planner.dag.layer_graph import LayerGraph
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile
from tests.planner.branching import (
    branch_instance,
    every_order,
    inception,
    least_of_all_orders,
    random_branches,
    two_towers,
    unet,
)
from tests.planner.instances import Instance, search_alone

ROUNDING = 1e-10

SEEDS = 9
"""Problems of one test: 270 of them against brute force."""

OBJECTIVES = ["step_time", "throughput", "latency", "memory", "devices"]


def planned(problem):
    """The plan, checked; `None` where there is none (without looking for ways out)."""
    try:
        found = search_alone(problem)
    except Infeasible:
        return None
    except InvalidInput as error:
        if not (error.field or "").startswith("/options/"):
            raise
        return None  # options that contradict each other, for brute force as well
    validate(found.plan, problem.profile, problem.cluster)
    return found


def is_close(one, other):
    return math.isclose(one, other, rel_tol=ROUNDING)


def prices_ties_roughly(problem):
    """Whether the bound is below the least plan where weights are tied."""
    tied = [entry for entry in problem.profile.parameters if len(entry.layers) > 1]
    return (
        any(entry.trainable for entry in tied)
        and problem.options.objective == "step_time"
        and problem.options.tied == "priced"
        and (len(problem.cluster.levels) > 1 or any(len(entry.layers) > 2 for entry in tied))
    )


def check_exact(seed, **asked):
    """The plan has the least objective of all, or (chosen by simulation) its bound is that."""
    problem = branch_instance(seed, **asked)
    found, best = planned(problem), least_of_all_orders(problem)
    assert (found is None) == (best is None), seed
    if found is None:
        return
    if prices_ties_roughly(problem):
        assert found.lower_bound <= best[0] * (1 + ROUNDING), (seed, found, best)
    else:
        assert is_close(found.lower_bound, best[0]), (seed, found, best)
    if problem.options.objective == "step_time":
        assert found.best_value >= best[0] * (1 - ROUNDING), (seed, found, best)
    else:
        assert is_close(found.plan.proof.value, best[0]), (seed, found, best)


@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bound_of_a_step_is_the_least_of_every_order(schedule, chunk):
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        check_exact(seed, schedule=schedule)


@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_the_plan_is_the_least_of_every_order(objective, chunk):
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        check_exact(1000 + seed, objective=objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_where_not_all_orders_can_be_searched_the_bound_still_holds(objective, monkeypatch):
    monkeypatch.setattr(branches_module, "MAX_STAGES", 8)
    monkeypatch.setattr(branches_module, "MAX_LEFT_STAGES", 8)
    several = 0
    for seed in range(8):
        problem = branch_instance(2000 + seed, objective=objective)
        found, best = planned(problem), least_of_all_orders(problem)
        if found is None:
            continue
        several += any("too many orders" in note for note in found.plan.notes)
        assert found.lower_bound <= best[0] * (1 + ROUNDING), (seed, found, best)
        assert found.best_value >= best[0] * (1 - ROUNDING), (seed, found, best)
    assert several > 1


@pytest.mark.parametrize("objective", ["step_time", "throughput"])
def test_what_no_better_plan_has_may_be_left_out(objective, monkeypatch):
    monkeypatch.setattr(branches_module, "MAX_STAGES", 8)
    for seed in range(40):
        check_exact(3000 + seed, objective=objective)


def test_long_stages_are_left_out(monkeypatch):
    """Of two towers on four devices one set in six is left, and one stage in thirty."""
    profile = two_towers(6)
    options = PlanOptions(layer_order="any", num_microbatches=32)
    every = LayerGraph(profile, options).stages
    given = Instance(profile, Cluster.parse("4xcpu"), options)
    found = search_alone(given)
    monkeypatch.setattr(branches_module, "MAX_STAGES", 200)
    kept = []
    within = LayerGraph.within
    monkeypatch.setattr(
        LayerGraph, "within", lambda own, limits: kept.append(within(own, limits)) or kept[-1]
    )
    made = search_alone(given)
    assert made.best_value == found.best_value
    assert made.lower_bound == found.lower_bound
    assert 0 < len(kept[0].members) < len(every.members) / 2
    assert 0 < len(kept[0].first) < len(every.first) / 4


def test_coarse_sets_are_sets_too(monkeypatch):
    problem = branch_instance(3, layers=(5,))
    profile = two_towers(6)
    options = PlanOptions(layer_order="any", num_microbatches=4)
    every = LayerGraph(profile, options).stages
    monkeypatch.setattr(branches_module, "MAX_STAGES", 200)
    fewer = LayerGraph(profile, options).coarse
    assert fewer is not None
    assert 5 < len(fewer.members) < len(every.members)
    assert {row.tobytes() for row in fewer.members} < {row.tobytes() for row in every.members}
    made = plan(profile, problem.cluster, options)
    validate(made, profile, problem.cluster)


def test_costs_of_sets_are_those_of_the_profile_in_that_order():
    for seed in range(30):
        profile = random_branches(seed, 5, ties=2)
        branches = LayerGraph(profile, PlanOptions(layer_order="any"))
        for ordered, order in list(zip(every_order(profile), _orders(profile), strict=True))[::4]:
            cuts = (0, 1, 3, 5)
            found, expected = branches.costs.chain_costs(order, cuts), chain_costs(ordered, cuts)
            upper = np.triu_indices(len(cuts), k=1)
            for name in (
                "forward_s", "backward_s", "recompute_s", "weights_bytes", "gradients_bytes",
                "learned_elements", "saved_bytes", "workspace_bytes",
            ):  # fmt: skip
                one, other = getattr(found, name)[upper], getattr(expected, name)[upper]
                np.testing.assert_allclose(one, other, rtol=1e-12, err_msg=f"{seed} {name}")
            for name in ("arriving_bytes", "returning_bytes", "input_bytes"):
                np.testing.assert_array_equal(
                    getattr(found, name), getattr(expected, name), err_msg=f"{seed} {name}"
                )
            assert [entry.layers for entry in found.tied] == [
                entry.layers for entry in expected.tied
            ]


def _orders(profile):
    names = {entry.layer.name: index for index, entry in enumerate(profile.layers)}
    for ordered in every_order(profile):
        yield tuple(names[entry.layer.name] for entry in ordered.layers)


@pytest.mark.parametrize(
    "profile", [unet(5), inception(2), two_towers(5)], ids=["unet", "inception", "towers"]
)
def test_any_order_is_never_worse_than_the_given_one(profile):
    cluster = Cluster.parse("4x1GB")
    for objective in OBJECTIVES:
        given, free = (
            plan(profile, cluster, PlanOptions(objective=objective, layer_order=order))
            for order in ("given", "any")
        )
        validate(free, profile, cluster)
        for found in (free.proof.value, free.proof.lower_bound):
            if objective != "step_time":  # there the simulated step decides
                assert found <= given.proof.value * (1 + ROUNDING), objective
        assert free.proof.lower_bound <= given.proof.lower_bound * (1 + ROUNDING), objective
        assert free.step_time_s <= given.step_time_s * (1 + ROUNDING) or objective != "step_time"


def test_towers_of_unequal_blocks_gain_from_another_order():
    forward_s = [3e-3] * 3 + [1e-3] * 3 + [1e-5]
    profile, cluster = two_towers(3, forward_s=forward_s), Cluster.parse("3x1GB")
    problem = {"num_microbatches": 12, "objective": "throughput"}
    given = plan(profile, cluster, PlanOptions(**problem))
    free = plan(profile, cluster, PlanOptions(layer_order="any", **problem))
    assert free.layer_order
    assert not given.layer_order
    assert free.proof.value < given.proof.value * 0.7
    assert free.proof.status == "optimal"


def test_a_chain_has_one_order():
    profile = unet(3)
    free = plan(profile, "3x1GB", PlanOptions(layer_order="any"))
    assert not free.layer_order
    assert LayerGraph(profile, PlanOptions()).is_chain


def test_without_edges_the_order_is_kept_and_said_to_be():
    profile = chain_profile([1e-3, 2e-3, 3e-3])
    free = plan(profile, "2x1GB", PlanOptions(layer_order="any"))
    assert not free.layer_order
    assert any("which layer reads what" in note for note in free.notes)


@pytest.mark.parametrize("objective", ["balance_time", "balance_size", "pipedream"])
def test_objectives_that_know_one_order_refuse_others(objective):
    with pytest.raises(InvalidInput, match="the profile's own order"):
        plan(two_towers(2), "2x1GB", PlanOptions(layer_order="any", objective=objective))


def test_other_schedules_are_planned_in_the_given_order():
    profile, cluster = two_towers(2), Cluster.parse("2x1GB")
    made = plan(profile, cluster, PlanOptions(layer_order="any", schedule="zero_bubble"))
    validate(made, profile, cluster)


def test_layers_kept_together_take_what_lies_between_them_along():
    names = [f"layer.{index}" for index in range(7)]
    profile = two_towers(3)  # 0, 1, 2 beside 3, 4, 5; then 6
    options = PlanOptions(layer_order="any", together=((names[0], names[2]), (names[1], names[4])))
    nodes = LayerGraph(profile, options).nodes
    assert sorted(nodes.members) == sorted([0b0010111, 0b0001000, 0b0100000, 0b1000000])
    for row in LayerGraph(profile, options).stages.members:
        assert row[0] == row[1] == row[2] == row[4]
