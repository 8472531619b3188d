"""Prices of several classes of devices, and beams: quick, and no plan is lost by them."""

import math
import random

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.plan import Planner
from stagewright.planner.problem.constraints import allowed_positions, search_parts
from stagewright.planner.search import branch_and_bound
from stagewright.planner.search.arcs import MetricCaps
from stagewright.planner.search.label_setting import relax, search
from stagewright.planner.search.label_table import USED, LabelTable, thin_labels
from tests.builders import random_profile
from tests.planner.instances import Instance, bound_memory, plan_alone, search_alone
from tests.planner.oracle import least
from tests.planner.search.test_label_setting import problem

KINDS = "abc"


def mixed_instance(seed, **asked):
    """3 to 5 layers on 4 to 6 devices of two or three kinds, of other speeds and memory."""
    draw = random.Random(seed)
    kinds = KINDS[: draw.choice([2, 3, 3])]
    count = draw.randint(4, 6)
    names = [*kinds, *(draw.choice(kinds) for _ in range(count - len(kinds)))]
    draw.shuffle(names)
    speed = {kind: draw.choice([0.35, 0.5, 1.0, 1.0, 1.7, 2.0]) for kind in kinds}
    devices = tuple(
        Device(name=f"{kind}:{index}", kind=kind, speed=speed[kind])
        for index, kind in enumerate(names)
    )
    link = LinkLevel(
        name="network", group_size=6, latency_s=draw.choice([0.0, 1e-5]),
        bandwidth_bytes_per_s=10 ** draw.uniform(6, 9),
    )  # fmt: skip
    options = PlanOptions(
        num_microbatches=draw.choice([2, 4, 6, 8]),
        schedule=draw.choice(["1f1b", "gpipe"]),
        max_replicas=draw.choice([None, 1, 1]),
        recompute=draw.choice(["never", "auto"]),
    )
    profile = random_profile(seed, draw.choice([3, 4, 5]), ties=0, illegal=0.0)
    found = Instance(profile, Cluster(devices=devices, levels=(link,)), options).asked(**asked)
    return bound_memory(draw, found) if draw.random() < 0.7 else found


@pytest.mark.parametrize("gap", [0.0, 0.05])
@pytest.mark.parametrize("chunk", range(3))
def test_narrow_beams_lose_no_plan(chunk, gap, monkeypatch):
    """A beam of one label leaves out the best plan often; it is found all the same."""
    monkeypatch.setattr(branch_and_bound, "BEAM", 1)
    for seed in range(20 * chunk, 20 * chunk + 20):
        given = mixed_instance(seed, gap=gap)
        best = least(given)
        if best is None:
            with pytest.raises(Infeasible):
                plan_alone(given)
            continue
        proof = search_alone(given)
        assert proof.lower_bound <= best.rank[0] * (1 + 1e-10), seed
        assert proof.lower_bound >= best.rank[0] * (1 - gap - 1e-10), seed


def test_a_beam_finds_paths_within_every_limit():
    thinned = found = 0
    for seed in range(60):
        given = problem(seed, "1f1b")
        exact = given.search(MetricCaps()).best
        quick = search(given.arcs, given.pool, given.rules, MetricCaps(), beam=1)
        thinned += not quick.complete
        if quick.best is not None:
            found += 1
            assert exact.total <= quick.best.total * (1 + 1e-12), seed
            assert all(
                used <= total
                for used, total in zip(quick.best.used, given.pool.total.tolist(), strict=True)
            ), seed
        elif quick.complete:
            assert exact is None, seed
    assert thinned > 10
    assert found > 30


def half_usable(profile, options):
    """Three devices with memory and three, equally fast, without."""
    devices = tuple(
        Device(name=f"{kind}:{index}", kind=kind, memory_bytes=memory_bytes)
        for kind, memory_bytes in (("large", 10**9), ("small", 1))
        for index in range(3)
    )
    link = LinkLevel(name="network", group_size=6, bandwidth_bytes_per_s=1e9)
    return Instance(profile, Cluster(devices=devices, levels=(link,)), options)


def test_a_kind_that_is_short_costs_more_than_an_idle_one():
    """Five stages need five devices of the kind with memory: by speed alone there are six."""
    options = PlanOptions(num_microbatches=8, max_replicas=1)
    given = half_usable(random_profile(1, 12, ties=0, illegal=0.0), options)
    stages = chain_costs(given.profile, allowed_positions(given.profile, options)).stages
    devices = group_devices(given.cluster, options)
    space = next(search_parts(stages, devices, options)).space
    work_s = sum(stages.whole_s)
    relaxed = relax(
        space.arcs("1f1b"), space.pool(), space.rules("1f1b"),
        MetricCaps(first=7 * work_s / 4, weight=100 * work_s),
    )  # fmt: skip
    assert relaxed.least_weight > 100 * work_s


def test_plans_are_told_as_they_are_found():
    given = half_usable(random_profile(1, 12, ties=0, illegal=0.0), PlanOptions(num_microbatches=8))
    told = []
    Planner(given.profile).plan(given.cluster, given.options, progress=told.append)
    assert told[0].lower_bound == 0.0  # nothing is proven yet
    assert told[-1].lower_bound > 0.0


def test_known_prices_change_no_bound_for_the_worse():
    for seed in range(40):
        given = problem(seed, "1f1b")
        caps = MetricCaps(weight=1.0)
        first = relax(given.arcs, given.pool, given.rules, caps)
        again = relax(given.arcs, given.pool, given.rules, caps, first.prices)
        best = given.search(caps).best
        limit = math.inf if best is None else best.total * (1 + 1e-12)
        assert first.least_weight * (1 - 1e-12) <= again.least_weight, seed
        assert again.least_weight <= limit, seed


def test_a_beam_keeps_the_cheapest_labels_in_their_order():
    weights, used = [5.0, 1.0, 4.0, 3.0, 3.0, 3.0, 9.0], [0, 9, 0, 0, 0, 0, 0]
    columns = [row for count in used for row in [0] * USED + [count]]
    table = LabelTable(columns, *(list(weights) for _ in range(4)))
    # the second costs 1 + 9 x 0.5; the first is of another position
    size = thin_labels(table, [0.5], 1, 7, USED + 1, 3)
    assert table.weight[:size] == [5.0, 3.0, 3.0, 3.0]
    assert thin_labels(table, [0.5], 1, size, USED + 1, 2) == 3
