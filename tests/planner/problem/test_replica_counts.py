"""Numbers of replicas on grouped devices: none that could be better is left out."""

from functools import cache

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.plan import plan
from stagewright.planner.search.label_kernel import next_count, place
from tests.builders import chain_profile
from tests.planner.instances import Instance, search_alone
from tests.planner.oracle import least


def _in_flight(count, behind):
    return count * (1 + -(-behind // count))


@pytest.mark.parametrize("regular_from", [0, 5])
@pytest.mark.parametrize("groups", [(2,), (3,), (4,), (8,), (2, 4), (2, 8), (3, 6)])
def test_every_number_that_leaves_fewer_in_flight_is_tried(groups, regular_from):
    """Of the numbers that can be placed; at the end of a class and in front of other stages.

    Below ``regular_from`` every number is tried, and none of them rules out a larger one.
    """
    sizes = [*groups, 64]
    for total in range(3, 27):
        for free in {total, total - 1, max(total - 4, 1)}:
            for need in range(1, free + 1):
                for behind in range(0, 50, 3):
                    tried, count, fewest = [], need, 2**60
                    while 0 < count <= free:
                        if place(sizes, free == total, free, count) >= 0:
                            tried.append(count)
                            if count >= regular_from:
                                fewest = min(fewest, _in_flight(count, behind))
                        count = next_count(
                            sizes, total, free == total, count, behind, fewest, regular_from
                        )
                    for other in range(need, free + 1):
                        if place(sizes, free == total, free, other) >= 0:
                            assert any(
                                min(other, regular_from) <= entry <= other
                                and _in_flight(entry, behind) <= _in_flight(other, behind)
                                for entry in tried
                            ), (total, free, need, behind, other, tried)


def _pairs(kinds, bandwidth):
    devices = tuple(Device(name=f"{kind}:{i}", kind=kind) for i, kind in enumerate(kinds))
    return Cluster(
        devices=devices,
        levels=(
            LinkLevel(group_size=2, latency_s=0, bandwidth_bytes_per_s=bandwidth),
            LinkLevel(group_size=18, latency_s=0, bandwidth_bytes_per_s=bandwidth),
        ),
    )


def _few_in_flight(objective):
    """The first stage has room for 17 in flight: eight replicas behind it leave 16, six 18."""
    profile = chain_profile([1e-6, 0.55e-3, 1e-3], parameter_bytes=10**6, saved_bytes=1000)
    fields = profile.model_dump()
    fields["parameters"] = fields["parameters"][:1]
    for entry in fields["layers"][1:]:
        entry["layer"]["parameter_bytes"] = 0
    profile = Profile.model_validate(fields)
    options = PlanOptions(
        objective=objective, num_microbatches=40, max_replicas=None, num_stages=3, optimizer="none"
    )
    return Instance(profile, _pairs("a" * 18, 1e8), options).limited(2_017_000)


def _partial_pair(objective):
    """Seven devices of the kind in the middle, all of which leave fewest in flight."""
    profile = chain_profile([1e-6, 0.65e-3, 1e-3], parameter_bytes=4, saved_bytes=1000)
    names = [entry.layer.name for entry in profile.layers]
    pins = tuple(Pin(layer=name, kind=kind) for name, kind in zip(names, "bab", strict=True))
    options = PlanOptions(
        objective=objective, num_microbatches=35, max_replicas=None, num_stages=3,
        optimizer="none", pins=pins,
    )  # fmt: skip
    cluster = _pairs("a" * 7 + "b" * 8, 1e12)
    return Instance(profile, cluster, options).limited({"a": None, "b": 15_008})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("objective", ["step_time", "throughput"])
@pytest.mark.parametrize("make", [_few_in_flight, _partial_pair])
def test_replicas_that_leave_room_in_front(make, objective, compiled, monkeypatch):
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setenv("STAGEWRIGHT_NUMBA", str(int(compiled)))
    given = make(objective)
    found = search_alone(given)
    assert found.lower_bound == pytest.approx(found.best_value, rel=1e-9)
    assert found.best_value == pytest.approx(least_value(make, objective), rel=1e-9)


@cache
def least_value(make, objective):
    """By brute force, once for both ways to run."""
    return least(make(objective)).rank[0]


def test_fewest_devices_are_not_claimed_for_a_plan_with_more():
    """Where time ends between the proof of how many are needed and the plan of so many."""
    given = _few_in_flight("devices")
    fewest = least(given).rank[0]
    for deadline_s in (0.0, 1e-3, 3e-3, 1e-2, 10.0):
        found = plan(given.profile, given.cluster, given.options, deadline_s=deadline_s)
        used = sum(len(stage.devices) for stage in found.stages)
        assert found.proof.lower_bound <= fewest
        if found.proof.status == "optimal":
            assert used == fewest
