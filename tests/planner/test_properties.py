"""What holds of every plan, on random problems larger than brute force can take."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.assignment import count_layers
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.heuristics.candidates import equal_layers, even_times
from stagewright.planner.heuristics.published_rules import pipedream_plan, torchgpipe_balance
from stagewright.planner.plan import Planner, plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.problem.constraints import allowed_positions
from stagewright.planner.validation.validate import validate
from tests.builders import random_profile
from tests.planner.instances import Instance, instance, search_alone

ROUNDING = 1 + 1e-10


def larger(seed, **asked):
    """3 to 12 layers on 2 to 8 devices: flat, nodes, or two kinds in a node."""
    draw = random.Random(seed)
    profile = random_profile(
        seed, draw.randrange(3, 13), ties=draw.choice([0, 0, 1]), illegal=draw.choice([0, 0, 0.2])
    )
    memory_bytes = draw.choice([None, None, draw.randrange(40_000, 150_000)])
    options = {
        "num_microbatches": draw.choice([1, 2, 4, 6, 8, 8, 16, 32]),
        "schedule": draw.choice(["1f1b", "1f1b", "gpipe"]),
        "max_replicas": draw.choice([None, None, None, 1, 2]),
        "recompute": draw.choice(["never", "never", "auto", "always"]),
        "optimizer": draw.choice(["none", "adam"]),
        **asked,
    }
    return Instance(profile, _cluster(draw, memory_bytes), PlanOptions(**options))


def _cluster(draw, memory_bytes):
    bandwidth = 10 ** draw.uniform(5.5, 8.5)
    kind = draw.choice(["flat", "flat", "nodes", "kinds"])
    if kind == "flat":
        return flat(draw.randrange(2, 9), memory_bytes, bandwidth)
    nodes, each = draw.choice([(2, 2), (2, 4), (4, 2), (3, 2)])
    cluster = nested(nodes, each, memory_bytes, bandwidth)
    if kind == "nodes":
        return cluster
    devices = tuple(
        Device(
            name=device.name,
            kind="old" if index % each == 0 else "new",
            speed=1.0 if index % each == 0 else 2.0,
            memory_bytes=memory_bytes,
        )
        for index, device in enumerate(cluster.devices)
    )
    return cluster.model_copy(update={"devices": devices})


def flat(num_devices, memory_bytes=None, bandwidth=1e7):
    return Cluster.uniform(num_devices, memory_bytes=memory_bytes, bandwidth_bytes_per_s=bandwidth)


def nested(nodes, each, memory_bytes=None, bandwidth=1e7):
    return Cluster.of_nodes(
        nodes,
        each,
        inside=LinkLevel(group_size=1, latency_s=1e-6, bandwidth_bytes_per_s=10 * bandwidth),
        between=LinkLevel(group_size=1, latency_s=1e-5, bandwidth_bytes_per_s=bandwidth),
        memory_bytes=memory_bytes,
    )


def planned(problem):
    """The plan; `None` where there is none."""
    try:
        return plan(problem.profile, problem.cluster, problem.options)
    except Infeasible:
        return None


def chosen(problem, counts, replicas=()):
    """A plan somebody else chose; `None` where it cannot be used."""
    most = problem.options.max_replicas or problem.options.num_microbatches
    if max(replicas, default=1) > min(most, problem.options.num_microbatches):
        return None
    try:
        return plan_from_balance(
            problem.profile, problem.cluster, problem.options, counts, replicas=replicas
        )
    except (Infeasible, InvalidInput):
        return None


def uniform_grids(problem):
    """S stages of r devices each, cut evenly by time and by layers."""
    profile, options = problem.profile, problem.options
    costs = chain_costs(profile, allowed_positions(profile, options))
    total = len(problem.cluster.devices)
    for num_stages in range(1, min(total, len(profile.layers)) + 1):
        cuts = {equal_layers(len(profile.layers), num_stages), even_times(costs, num_stages)}
        for replicas in range(1, total // num_stages + 1):
            for entry in cuts - {None}:
                yield count_layers(entry), [replicas] * num_stages


def torchgpipes(problem):
    """Every number of stages, one device each."""
    positions = allowed_positions(problem.profile, problem.options)
    layer_s = [entry.forward.median_s + entry.backward.median_s for entry in problem.profile.layers]
    most = min(len(positions) - 1, len(problem.cluster.devices))
    for num_stages in range(1, most + 1):
        yield torchgpipe_balance(layer_s, num_stages, positions), ()


def pipedreams(problem):
    """PipeDream's plan of every number of devices, by each link level's bandwidth."""
    positions = allowed_positions(problem.profile, problem.options)
    for level in problem.cluster.levels:
        for num_devices in range(1, len(problem.cluster.devices) + 1):
            found = pipedream_plan(
                problem.profile, num_devices, level.bandwidth_bytes_per_s, positions
            )
            if found is not None:
                yield found


@pytest.mark.parametrize("others", [uniform_grids, torchgpipes, pipedreams])
@pytest.mark.parametrize("chunk", range(2))
def test_no_other_planner_is_faster_or_below_a_bound(chunk, others):
    compared = 0
    for seed in range(chunk * 15, chunk * 15 + 15):
        problem = larger(seed)
        made = planned(problem)
        for counts, replicas in others(problem):
            other = chosen(problem, counts, replicas)
            if other is None:
                continue
            assert made is not None, (seed, counts, replicas)
            assert made.step_time_s <= other.step_time_s * ROUNDING, (seed, counts, replicas)
            assert made.proof.lower_bound <= other.proof.value * ROUNDING, (seed, counts)
            bound_s = made.proof.simulated_lower_bound_s
            assert bound_s <= other.step_time_s * ROUNDING, (seed, counts, replicas)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("chunk", range(3))
def test_plans_validate_and_keep_their_bounds(chunk):
    for seed in range(chunk * 20, chunk * 20 + 20):
        problem = larger(seed)
        made = planned(problem)
        if made is not None:
            validate(made, problem.profile, problem.cluster)
            assert made.proof.lower_bound <= made.proof.value
            assert made.proof.simulated_lower_bound_s <= made.step_time_s


def least(problem):
    """No plan's objective is below; infinite where there is no plan."""
    try:
        return search_alone(problem).lower_bound
    except Infeasible:
        return math.inf


def assert_falling(values, seed):
    for one, other in pairwise(values):
        assert other <= one * ROUNDING, (seed, values)


@pytest.mark.parametrize("objective", ["step_time", "throughput"])
def test_more_devices_are_never_worse(objective):
    for seed in range(8):
        problem = larger(seed, objective=objective)
        memory_bytes = problem.cluster.devices[0].memory_bytes
        clusters = [flat(count, memory_bytes) for count in range(1, 9)]
        assert_falling([least(replace(problem, cluster=entry)) for entry in clusters], seed)
        clusters = [nested(count, 2, memory_bytes) for count in range(1, 5)]
        assert_falling([least(replace(problem, cluster=entry)) for entry in clusters], seed)


@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory"])
def test_one_device_more_in_nested_groups_is_never_worse(objective):
    """A fifth device in threes once forbade the stage that had a whole three and the fourth."""
    for seed in (15, 21, 22, 24, 28, 31, 82, 89, 102):
        problem, draw = larger(seed, objective=objective), random.Random(seed)
        sizes = draw.choice([(3, 6, 12), (2, 6, 12), (4, 12)])
        levels = tuple(
            LinkLevel(
                group_size=size,
                latency_s=0.0,
                bandwidth_bytes_per_s=10 ** draw.uniform(5.5, 8.5),
            )
            for size in sizes
        )
        devices = Cluster.uniform(9, memory_bytes=problem.cluster.devices[0].memory_bytes).devices
        clusters = [Cluster(devices=devices[:count], levels=levels) for count in range(1, 10)]
        assert_falling([least(replace(problem, cluster=entry)) for entry in clusters], seed)


@pytest.mark.parametrize("objective", ["step_time", "throughput"])
def test_more_memory_is_never_worse(objective):
    for seed in range(8):
        problem = larger(seed, objective=objective)
        limits = [20_000, 40_000, 60_000, 90_000, 130_000, 200_000, None]
        assert_falling([least(problem.limited(limit)) for limit in limits], seed)


@pytest.mark.parametrize("objective", ["step_time", "throughput", "latency"])
def test_faster_links_are_never_worse(objective):
    for seed in range(8):
        problem = larger(seed, objective=objective)
        values = []
        for factor in (0.1, 0.5, 1, 3, 30):
            levels = tuple(
                level.model_copy(
                    update={"bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * factor}
                )
                for level in problem.cluster.levels
            )
            cluster = problem.cluster.model_copy(update={"levels": levels})
            values.append(least(replace(problem, cluster=cluster)))
        assert_falling(values, seed)


@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory"])
def test_a_larger_gap_is_kept(objective):
    for seed in range(10):
        exact, rough = (planned(larger(seed, objective=objective, gap=gap)) for gap in (0, 0.1))
        if exact is None:
            assert rough is None
            continue
        best = exact.proof.value
        assert rough.proof.lower_bound <= best * ROUNDING, seed
        if objective != "step_time":
            assert rough.proof.value <= best / (1 - 0.1) * ROUNDING, seed


def test_a_planner_used_again_gives_the_plan_of_a_new_one():
    for seed in range(8):
        first = instance(seed) if seed % 2 else larger(seed)
        planner = Planner(first.profile)
        for what_if in (
            first,
            first.limited(90_000),
            first.asked(num_microbatches=5),
            first.asked(recompute="auto", max_replicas=None),
            first.asked(objective="throughput"),
            replace(first, cluster=flat(3)),
            first,
        ):
            fresh = outcome(plan, what_if.profile, what_if.cluster, what_if.options)
            assert outcome(planner.plan, what_if.cluster, what_if.options) == fresh


def outcome(planning, *arguments):
    """The plan's JSON, or the error."""
    try:
        return planning(*arguments).to_json()
    except (Infeasible, InvalidInput) as error:
        return type(error), str(error)


@pytest.mark.parametrize("objective", ["step_time", "throughput", "latency", "memory", "devices"])
def test_compiled_or_not_the_plan_is_the_same(objective, monkeypatch):
    pytest.importorskip("numba")
    for seed in range(8):
        problem = larger(seed, objective=objective)
        compiled = planned(problem)
        with monkeypatch.context() as patch:
            patch.setenv("STAGEWRIGHT_NUMBA", "0")
            plain = planned(problem)
        assert (compiled is None) == (plain is None)
        assert compiled is None or compiled.to_json() == plain.to_json(), seed
