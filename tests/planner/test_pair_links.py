"""Links of pairs of nodes: bounds hold for every plan there is, and plans are the best of all."""

import random
from itertools import product

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.cluster.pair_links import PairLink
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.device_classes import group_devices as group_devices_of
from stagewright.planner.plan import plan
from stagewright.planner.problem.split_layers import group_devices
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile, random_profile
from tests.planner.instances import Instance, instance, plan_alone, search_alone, with_figures
from tests.planner.oracle import usable_plans

ROUNDING = 1e-9


def with_pair_links(seed, **asked):
    """A small problem on nodes, some pairs of which are joined faster or slower than others."""
    given = instance(seed, **asked)
    levels = given.cluster.levels
    if len(levels) < 2 or any(level.shared for level in levels):
        return None
    draw = random.Random(seed)
    size = levels[0].group_size
    groups = [str(number) for number in range(-(-len(given.cluster.devices) // size))]
    links = [
        PairLink(
            level=levels[0].name,
            groups=(one, other),
            latency_s=levels[1].latency_s * draw.choice((0.1, 1, 10)),
            bandwidth_bytes_per_s=levels[1].bandwidth_bytes_per_s * draw.choice((0.05, 0.3, 4, 20)),
        )
        for place, one in enumerate(groups)
        for other in groups[place + 1 :]
        if draw.random() < 0.6
    ]
    names = [f"level {index}" for index in range(len(levels))]
    document = given.cluster.model_dump()
    for level, name in zip(document["levels"], names, strict=True):
        level["name"] = name
    document["links"] = [{**link.model_dump(), "level": names[0]} for link in links]
    cluster = type(given.cluster).model_validate(document)
    return Instance(given.profile, cluster, given.options) if links else None


@pytest.mark.parametrize("objective", ["step_time", "throughput", "latency"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("by_number", [False, True])
def test_no_plan_is_below_the_bounds_and_the_best_is_found(objective, schedule, by_number):
    """Also where all-reduces of levels have figures by size and number."""
    found = 0
    for seed in range(60):
        given = with_pair_links(seed, objective=objective, schedule=schedule)
        if given is None:
            continue
        if by_number:
            given = with_figures(seed, given)
        try:
            searched = search_alone(given)
        except (Infeasible, InvalidInput):
            assert not list(usable_plans(given))
            continue
        made = searched.plan
        validate(made, given.profile, given.cluster)
        plans = list(usable_plans(given))
        least = min(split.objective() for split in plans)
        assert searched.lower_bound <= least * (1 + ROUNDING), seed
        found += 1
        if objective == "step_time":
            least_s = min(split.step_time_s() for split in plans)
            assert made.proof.simulated_lower_bound_s <= least_s * (1 + ROUNDING), seed
            assert made.step_time_s <= least_s * (1 + ROUNDING), seed
        elif objective == "latency":
            assert made.proof.value <= least * (1 + ROUNDING), seed
    assert found > 8


def test_a_bound_holds_for_the_places_that_were_not_simulated():
    """Nine replicas on the first devices sum over the slow pair, on the last ones they do not.

    The step on the first was printed as a bound on all plans.
    """
    slow = PairLink(level="L0", groups=("0", "1"), latency_s=0, bandwidth_bytes_per_s=1e8)
    levels = (
        LinkLevel(name="L0", group_size=2, latency_s=0, bandwidth_bytes_per_s=1e10),
        LinkLevel(name="L1", group_size=16, latency_s=0, bandwidth_bytes_per_s=1e9),
    )
    devices = tuple(Device(name=f"a:{index}", kind="a") for index in range(11))
    cluster = Cluster(devices=devices, levels=levels, links=(slow,))
    profile = chain_profile([1e-3], parameter_bytes=10**6)
    options = PlanOptions(num_microbatches=9, max_replicas=None)
    made = plan(profile, cluster, options)
    splits = usable_plans(Instance(profile, cluster, options))
    least_s = min(split.step_time_s() for split in splits)
    assert least_s < 4e-3
    assert made.proof.simulated_lower_bound_s <= least_s * (1 + ROUNDING)


def test_the_cluster_of_bounds_sums_no_slower_than_any_level_or_link():
    """Where a level has figures by size and number, and pairs of its groups links of their own."""
    checked = 0
    for seed in range(120):
        given = with_pair_links(seed)
        if given is None:
            continue
        given = with_figures(seed, given)
        bounds = group_devices_of(given.cluster, given.options).bounding_cluster
        for level, bound in zip(given.cluster.levels, bounds.levels, strict=True):
            for size, count in product((10, 10**4, 10**8), (2, 3, 5, 9)):
                least_s = bound.all_reduce_time_s(size, count)
                assert least_s <= level.all_reduce_time_s(size, count) * (1 + ROUNDING), seed
                checked += level.all_reduce is not None and bound.all_reduce is None
    assert checked > 50


@pytest.mark.parametrize("objective", ["memory", "devices", "pipedream"])
def test_objectives_that_know_levels_only_refuse_pair_links(objective):
    given = next(filter(None, (with_pair_links(seed, objective=objective) for seed in range(99))))
    with pytest.raises(InvalidInput, match=f"{objective!r} knows links by level only"):
        plan_alone(given)


def test_groups_of_devices_that_share_a_layer_refuse_pair_links():
    given = next(filter(None, map(with_pair_links, range(99))))
    cluster = Cluster(
        devices=[device.model_copy(update={"speed": 1.0}) for device in given.cluster.devices],
        levels=given.cluster.levels,
        links=given.cluster.links,
    )
    with pytest.raises(InvalidInput, match="tensor=2 knows links by level only"):
        group_devices(cluster, 2)


def test_stages_of_two_nodes_are_next_to_each_other_over_the_fast_pair():
    """Of three nodes in a row, the last two are joined ten times as fast as the rest."""
    pair = PairLink(level="node", groups=("1", "2"), latency_s=0.0, bandwidth_bytes_per_s=10e9)
    inside = LinkLevel(name="node", latency_s=0.0, bandwidth_bytes_per_s=100e9)
    between = LinkLevel(name="network", latency_s=0.0, bandwidth_bytes_per_s=1e9)
    cluster = Cluster.of_nodes(3, 1, inside=inside, between=between)
    levels = ({**inside.model_dump(), "group_size": 1}, cluster.levels[-1].model_dump())
    cluster = Cluster.model_validate({**cluster.model_dump(), "levels": levels, "links": [pair]})
    made = plan(random_profile(0, 12), cluster, PlanOptions(num_stages=3))
    sends = [stage.send_forward_time_s / stage.send_forward_bytes for stage in made.stages[:-1]]
    assert sends == pytest.approx([1e-9, 1e-10])
