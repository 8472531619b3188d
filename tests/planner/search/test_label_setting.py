"""The label search: compiled and plain agree, caps lose nothing, bounds hold."""

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.cost.assignment import Assignment, shift_forward
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.problem.constraints import allowed_positions, search_parts
from stagewright.planner.search import label_kernel
from stagewright.planner.search.arcs import MetricCaps, SearchRules, SearchSpace, StageArcs
from stagewright.planner.search.branch_and_bound import largest_metrics
from stagewright.planner.search.device_pool import DevicePool
from stagewright.planner.search.label_setting import relax, search
from stagewright.planner.search.label_table import LabelTable
from tests.builders import random_cluster, random_profile
from tests.planner.instances import PATTERNS, draw_levels

MEASURES = ("1f1b", "gpipe", "throughput", "latency", "simulated_bound")
QUANTA = (0.0, 0.0, 1e-3, math.inf)
BUDGET = 2**62


@dataclass(frozen=True)
class Problem:
    """What a label search is given, caps aside."""

    space: SearchSpace
    arcs: StageArcs
    pool: DevicePool
    rules: SearchRules

    def search(self, caps):
        return search(self.arcs, self.pool, self.rules, caps, paths=2**30)

    def metrics(self, found):
        """Largest metrics of a path."""
        return largest_metrics(found.arcs, self.arcs, self.rules, self.space.devices)

    def exposed_s(self, stage):
        """Time for which the summing of a stage's gradients is exposed."""
        if stage.replicas == 1:
            return 0.0
        arc = self.arcs.find(stage.first, stage.last, stage.device_class, recompute=stage.recompute)
        entry = self.space.devices.classes[stage.device_class]
        sync_s = self.space.devices.bounding_cluster.all_reduce_time_s(
            int(self.arcs.gradients[arc]), stage.replicas,
            entry.level_of(stage.end - stage.replicas, stage.end - 1), entry.group_sizes,
        )  # fmt: skip
        return max(0.0, sync_s * self.rules.sync_scale - float(self.arcs.lead[stage.first]))


def problem(seed, measure=None):
    """A search of 2 to 12 layers on flat, nested or mixed devices, with every kind of option."""
    draw = random.Random(seed)
    profile = random_profile(seed, draw.choice([2, 3, 5, 8, 8, 12]), ties=draw.choice([0, 1]))
    cluster = _cluster(draw, seed)
    names = [entry.layer.name for entry in profile.layers]
    pins = []
    if draw.random() < 0.2:
        pins.append(Pin(layer=draw.choice(names), stage=draw.randrange(2)))
    if draw.random() < 0.2:
        pins.append(Pin(layer=draw.choice(names), kind=draw.choice(cluster.devices).kind))
    options = PlanOptions(
        num_microbatches=draw.choice([1, 3, 4, 8, 12]),
        max_replicas=draw.choice([None, 1, 2]),
        recompute=draw.choice(["never", "auto", "always"]),
        schedule=draw.choice(["1f1b", "gpipe"]),
        num_stages=draw.choice([None, None, 2]),
        max_stages=draw.choice([None, 3]),
        pins=tuple(pins),
        tied=draw.choice(["priced", "together"]),
    )
    costs = chain_costs(profile, allowed_positions(profile, options))
    found = list(search_parts(costs.stages, group_devices(cluster, options), options))
    if not found:  # pinned to a stage that no plan has
        found = list(
            search_parts(costs.stages, group_devices(cluster, PlanOptions()), PlanOptions())
        )
    space = draw.choice(found).space
    measure = measure or draw.choice([options.schedule, "throughput", "latency", "simulated_bound"])
    return Problem(space, space.arcs(measure), space.pool(), space.rules(measure))


def _cluster(draw, seed):
    memory_bytes = draw.choice([None, None, 40_000, 60_000, 120_000])
    kind = draw.choice(["flat", "nodes", "mixed", "mixed nodes"])
    if kind == "flat":
        return Cluster.uniform(
            draw.randrange(1, 9), memory_bytes=memory_bytes, bandwidth_bytes_per_s=1e6
        )
    if kind == "mixed":
        return random_cluster(seed, draw.randrange(1, 5), memory_bytes=memory_bytes)
    nodes = Cluster.of_nodes(
        draw.randrange(1, 4),
        draw.randrange(1, 4),
        inside=LinkLevel(group_size=1, bandwidth_bytes_per_s=1e8),
        between=LinkLevel(group_size=1, bandwidth_bytes_per_s=1e6),
        memory_bytes=memory_bytes,
    )
    if kind == "nodes":
        return nodes
    kinds = [draw.choice(["fast", "slow"]) for _ in nodes.devices]
    devices = tuple(
        device.model_copy(update={"kind": kind, "speed": 2.0 if kind == "fast" else 1.0})
        for device, kind in zip(nodes.devices, kinds, strict=True)
    )
    return nodes.model_copy(update={"devices": devices})


def caps_of(seed):
    draw = random.Random(-seed - 1)
    return MetricCaps(
        first=draw.choice([math.inf, draw.random() * 0.1]),
        second=draw.choice([math.inf, draw.random() * 0.1]),
        weight=draw.choice([math.inf, draw.random() * 0.1]),
        quantum=draw.choice(QUANTA),
    )


@pytest.mark.parametrize("measure", MEASURES)
def test_compiled_and_plain_find_the_same(measure, monkeypatch):
    """Paths, bounds and the number of labels, bit for bit."""
    pytest.importorskip("numba")
    kept = []
    for seed in range(40):
        given, caps = problem(seed, measure), caps_of(seed)
        found = []
        for setting in "10":
            monkeypatch.setenv("STAGEWRIGHT_NUMBA", setting)
            relaxed = relax(given.arcs, given.pool, given.rules, caps)
            found.append((given.search(caps), replace(relaxed, replicas=relaxed.replicas.tolist())))
        one, other = found
        assert repr(one) == repr(other), seed
        kept.append(one[0].labels)
    assert max(kept) > 10


@pytest.mark.parametrize("beam", [0, 2])
def test_labels_made_again_once_the_table_is_longer_change_nothing(beam, monkeypatch):
    """With a table that grows by one label, and with one that is never full."""
    monkeypatch.setenv("STAGEWRIGHT_NUMBA", "0")
    grown = []

    def grow_by(more):
        def grow(table, width):
            grown.append(more)
            longer = [column + [type(column[0])(0)] * more for column in table[1:]]
            return LabelTable(table.columns + [0] * (more * width), *longer)

        return grow

    for seed in range(60):
        given, caps = problem(seed), caps_of(seed)
        found = []
        for more in (1, 10_000):
            monkeypatch.setattr(label_kernel, "grow", grow_by(more))
            made = search(given.arcs, given.pool, given.rules, caps, paths=2**30, beam=beam)
            found.append(repr(made))
        assert found[0] == found[1], seed
    assert grown.count(1) > 5 * grown.count(10_000)


def test_pruned_arcs_lie_in_memory_as_all_do():
    """Another layout would compile all loops a second time, ten seconds long."""
    for seed in range(8):
        given = problem(seed, "1f1b")
        relaxed = relax(given.arcs, given.pool, given.rules, caps_of(seed))
        pruned = given.arcs.prune(relaxed.replicas)
        for name, one, other in zip(StageArcs._fields, given.arcs, pruned, strict=True):
            assert one.dtype == other.dtype, name
            assert one.flags.c_contiguous, name
            assert other.flags.c_contiguous, name


@pytest.mark.parametrize("measure", MEASURES)
def test_no_path_is_lighter_than_the_relaxed_weight(measure):
    tight = 0
    for seed in range(80):
        given, caps = problem(seed, measure), caps_of(seed)._replace(quantum=0.0)
        relaxed = relax(given.arcs, given.pool, given.rules, caps)
        bound, beyond = relaxed.least_weight, relaxed.next_metrics[0]
        assert beyond > caps.first * (1 - 1e-12) or beyond == math.inf, seed
        best = given.search(caps).best
        if best is not None:
            assert bound <= best.total * (1 + 1e-12) + 1e-12, seed
            tight += math.isclose(bound, best.total, rel_tol=1e-9, abs_tol=1e-12)
        elif bound == math.inf:
            tight += 1
    assert tight > 20


@pytest.mark.parametrize("measure", MEASURES)
def test_stages_judged_dead_are_part_of_no_path(measure):
    """Nor has a stage fewer replicas than it is relaxed to need, within tighter caps too."""
    fewer = 0
    for seed in range(120):
        given, caps = problem(seed, measure), caps_of(seed)._replace(quantum=0.0)
        relaxed = relax(given.arcs, given.pool, given.rules, caps)
        left = given.arcs.prune(relaxed.replicas)
        fewer += len(left.last) < len(given.arcs.last)
        for scale in (1.0, 0.9):
            tighter = caps._replace(first=caps.first * scale, weight=caps.weight * scale)
            one = given.search(tighter).best
            other = replace(given, arcs=left).search(tighter).best
            assert (one and one.total) == (other and other.total), seed
    assert fewer > 30


def test_arcs_that_a_search_did_not_reach_are_part_of_no_path():
    """Nor have the others fewer replicas than there, within tighter caps too."""
    fewer = more = cut_short = 0
    for seed in range(300):
        given, caps = problem(seed), caps_of(seed)
        budget = 2**62 if seed % 3 else 4
        outcome = search(given.arcs, given.pool, given.rules, caps, budget=budget)
        left = given.arcs.prune(outcome.replicas)
        relaxed = relax(given.arcs, given.pool, given.rules, caps)
        fewer += len(left.last) < (relaxed.replicas > 0).sum()
        more += bool((outcome.replicas > relaxed.replicas).any())
        cut_short += not outcome.complete
        for scale in (1.0, 0.9, 0.7):
            tighter = caps._replace(
                first=caps.first * scale, second=caps.second * scale, quantum=0.0,
                weight=caps.weight * min(1.0, scale + 0.1),
            )  # fmt: skip
            one = given.search(tighter).best
            other = replace(given, arcs=left).search(tighter).best
            assert (one and one.total) == (other and other.total), seed
    assert min(fewer, more, 3 * cut_short) > 60, (fewer, more, cut_short)


def test_every_path_keeps_the_limits():
    for seed in range(150):
        given, caps = problem(seed), caps_of(seed)._replace(quantum=0.0)
        outcome = given.search(caps)
        for found in outcome.paths():
            metrics = given.metrics(found)
            for value, limit in zip(metrics, (caps.first, caps.second), strict=True):
                assert value <= limit * (1 + 1e-12), seed
            assert found.total <= caps.weight * (1 + 1e-12), seed
            exposed_s = max(given.exposed_s(arc) for arc in found.arcs)
            assert math.isclose(found.total, found.weight + exposed_s, rel_tol=1e-12), seed
            assert all(used <= total for used, total in zip(
                found.used, given.pool.total.tolist(), strict=True
            )), seed  # fmt: skip


def test_a_quantum_loses_at_most_itself_a_stage():
    rough = 0
    for seed in range(150):
        given = _tight(seed)
        exact = given.search(MetricCaps()).best
        if exact is None:
            assert given.search(MetricCaps(quantum=math.inf)).best is None
            continue
        for share in (1e-3, 0.05, 0.3):
            quantum = share * exact.total or 1.0
            best = given.search(MetricCaps(quantum=quantum)).best
            lost = quantum * len(exact.arcs)
            assert exact.total * (1 - 1e-12) <= best.total <= exact.total + lost + 1e-12, seed
            rough += best.total > exact.total * (1 + 1e-12)
        assert given.search(MetricCaps(quantum=math.inf)).best is not None, seed
    assert rough > 0


def test_comparing_roughly_never_loses_the_last_path_below_a_weight():
    """A label kept for a lighter one used to be given up for exceeding the weight itself.

    Then a search that found nothing did not mean that there was nothing.
    """
    tried = 0
    for seed in (208, 252, *range(120)):
        given = _tight(seed)
        free = given.search(MetricCaps()).best
        if free is None:
            continue
        first = given.metrics(free)[0] * random.Random(seed).uniform(0.3, 1)
        best = given.search(MetricCaps(first=first)).best
        if best is None:
            continue
        for quantum in (best.total / 10, math.inf):
            caps = MetricCaps(first=first, weight=best.total * (1 + 1e-9), quantum=quantum)
            assert given.search(caps).best is not None, seed
        tried += 1
    assert tried > 50


def _tight(seed):
    """Recomputation, memory and slow links: weights that differ a lot."""
    draw = random.Random(seed)
    profile = random_profile(seed, draw.randrange(8, 16))
    cluster = Cluster.uniform(
        draw.randrange(4, 13),
        memory_bytes=draw.randrange(20_000, 90_000),
        bandwidth_bytes_per_s=10 ** draw.uniform(5, 6.5),
    )
    options = PlanOptions(
        num_microbatches=draw.choice([4, 8]),
        max_replicas=None,
        recompute="auto",
        schedule=draw.choice(["1f1b", "gpipe"]),
    )
    costs = chain_costs(profile, allowed_positions(profile, options))
    space = SearchSpace(costs.stages, group_devices(cluster, options), options)
    measure = options.schedule
    return Problem(space, space.arcs(measure), space.pool(), space.rules(measure))


@pytest.mark.parametrize("measure", ["1f1b", "gpipe", "throughput", "simulated_bound"])
def test_nothing_new_appears_below_the_next_first_metric(measure):
    """MetricCaps between the one searched and `next_metrics` give the same labels."""
    new = between = 0
    for seed in range(100):
        given = problem(seed, measure)
        free = given.search(MetricCaps()).best
        if free is None:
            continue
        limit = given.metrics(free)[0] * random.Random(seed).uniform(0.2, 1.0)
        one = given.search(MetricCaps(first=limit))
        if one.next_metrics[0] == math.inf:
            assert _weights(one) == _weights(given.search(MetricCaps())), seed
            continue
        assert one.next_metrics[0] > limit * (1 - 1e-12), seed
        middle = limit + (one.next_metrics[0] - limit) * 0.999
        assert _weights(given.search(MetricCaps(first=middle))) == _weights(one), seed
        between += 1
        then = given.search(MetricCaps(first=one.next_metrics[0] * (1 + 1e-12)))
        assert then.next_metrics[0] > one.next_metrics[0], seed
        new += _weights(then) != _weights(one)
    assert between > 20
    assert new > 5


def _weights(outcome):
    return sorted((path.total, path.used) for path in outcome.paths())


def test_a_budget_that_is_spent_says_so():
    for seed in range(40):
        given = _tight(seed)
        outcome = search(given.arcs, given.pool, given.rules, MetricCaps(), budget=1)
        if not outcome.complete:
            assert outcome.best is None
            return
    pytest.fail("no search looked at two labels")


def test_moving_a_plan_to_the_front_changes_no_link_between_its_stages():
    """A kind in whole pairs but unequal sixes was moved by one device: pairs were torn apart."""
    moved = 0
    for seed in range(2000):
        draw = random.Random(seed)
        kinds, levels = draw.choice(PATTERNS), draw_levels(draw, (2, 6, 12))
        names = [f"{kind}:{index}" for index, kind in enumerate(kinds)]
        listed = tuple(Device(name=name, kind=name[0]) for name in names)
        devices = group_devices(Cluster(devices=listed, levels=levels), PlanOptions())
        entry = devices.classes[0]
        ends = sorted(draw.sample(range(1, len(entry) + 1), draw.randint(2, len(entry))))
        found = Assignment(
            cuts=tuple(range(len(ends) + 1)),
            replicas=(1,) * len(ends),
            classes=(0,) * len(ends),
            ends=tuple(ends),
            recompute=(False,) * len(ends),
        )
        other = shift_forward(found, devices)
        for (one, two), (then, next_one) in zip(
            pairwise(found.ends), pairwise(other.ends), strict=True
        ):
            assert entry.level_of(then - 1, next_one - 1) == entry.level_of(one - 1, two - 1), seed
        moved += other != found
    assert moved > 20
