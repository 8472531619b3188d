"""The walk-through of the search in docs/concepts/planner.md has the numbers of the code."""

from pathlib import Path

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.problem.constraints import allowed_positions
from stagewright.planner.search.arcs import MetricCaps, SearchSpace
from stagewright.planner.search.branch_and_bound import BranchAndBound, Effort
from stagewright.planner.search.label_setting import relax, search
from tests.builders import chain_profile

DOCUMENT = Path(__file__).parents[3] / "docs" / "concepts" / "planner.md"


@pytest.fixture
def solver():
    profile = chain_profile([1, 2, 3])
    options = PlanOptions(num_microbatches=4, max_replicas=1)
    costs = chain_costs(profile, allowed_positions(profile, options))
    devices = group_devices(Cluster.uniform(2), options)
    return BranchAndBound(SearchSpace(costs.stages, devices, options), "1f1b", Effort())


def test_the_table_of_arcs_is_that_of_the_code(solver):
    arcs = solver.arcs
    spans = zip(arcs.first_positions(), arcs.last, strict=True)
    rows = (
        "| arc | " + " | ".join(f"{first} -> {last}" for first, last in spans) + " |",
        "| weight, s | " + " | ".join(f"{each:.0f}" for each in arcs.weight) + " |",
        "| metric 3 tau, s | " + " | ".join(f"{3 * each:.0f}" for each in arcs.first_unit) + " |",
    )
    text = DOCUMENT.read_text()
    assert all(row in text for row in rows), rows


def test_the_steps_told_are_those_of_the_search(solver):
    given = (solver.arcs, solver.pool, solver.rules)
    free = search(*given, MetricCaps())
    assert [(arc.first, arc.last) for arc in free.best.arcs] == [(0, 3)]
    capped = search(*given, MetricCaps(first=30.0))
    assert [(arc.first, arc.last) for arc in capped.best.arcs] == [(0, 2), (2, 3)]
    assert (capped.best.weight, capped.best.used, capped.labels) == (18.0, (2,), 3)
    assert capped.next_metrics[0] == 36.0
    refused = relax(*given, MetricCaps(first=20.0))
    assert (refused.least_weight, refused.next_metrics[0]) == (float("inf"), 27.0)
    solver.run()
    assert (solver.best.metrics[0], solver.best.value, solver.bound) == (27.0, 45.0, 45.0)
