"""Plans of long chains are looked for just above the bound before boxes are opened."""

import pytest

from stagewright.core.cluster.cluster import Cluster, Device
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.search import branch_and_bound
from stagewright.planner.search.branch_and_bound import BranchAndBound
from tests.planner.instances import Instance, search_alone
from tests.planner.uneven import nodes, uneven_profile


def kinds(count):
    return Cluster.uniform(6).model_copy(
        update={
            "devices": tuple(
                Device(name=f"device.{index}", kind=f"kind.{number}", speed=1 / (1 + 0.3 * number))
                for index in range(6)
                for number in [index % count]
            )
        }
    )


NODES = nodes(4, 24)


@pytest.mark.parametrize("gap", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("cluster", [kinds(1), kinds(3), NODES])
def test_a_plan_above_the_bound_changes_no_proof(monkeypatch, cluster, gap):
    """With no gap asked for, the distance from the bound once stayed 0 for ever."""
    options = PlanOptions(num_microbatches=64, max_replicas=None, recompute="auto", gap=gap)
    profile = uneven_profile(40, 5)
    before = search_alone(Instance(profile, cluster, options))
    asked, own = [], BranchAndBound._find_near

    def find_near(search, lower):
        asked.append(lower)
        own(search, lower)

    monkeypatch.setattr(BranchAndBound, "_find_near", find_near)
    monkeypatch.setattr(branch_and_bound, "LONG", 0)
    after = search_alone(Instance(profile, cluster, options))
    assert asked
    assert 1 - after.lower_bound / after.best_value <= gap + 1e-9
    for one, other in ((before, after), (after, before)):
        assert one.lower_bound <= other.best_value * (1 + 1e-9)
