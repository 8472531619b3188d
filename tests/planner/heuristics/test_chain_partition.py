"""The balance is the best one there is, by trying all of them."""

import math
import random
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.heuristics.chain_partition import balance
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile

COSTS = st.lists(
    st.one_of(
        st.integers(0, 5).map(float),
        st.floats(0, 1e6, allow_subnormal=True),
        st.sampled_from([0.1, 0.2, 0.3, 1e-300, 1e300]),
    ),
    min_size=1,
    max_size=9,
)


def value(costs, counts):
    """Largest part and sum of squares, in exact arithmetic."""
    cuts = [0]
    for count in counts:
        cuts.append(cuts[-1] + count)
    parts = [sum(map(Fraction, costs[first:last]), Fraction(0)) for first, last in pairwise(cuts)]
    return max(parts), sum(part * part for part in parts)


def every_balance(num_items, num_parts):
    for inner in combinations(range(1, num_items), num_parts - 1):
        yield [last - first for first, last in pairwise([0, *inner, num_items])]


@settings(deadline=None, max_examples=300)
@given(COSTS, st.data())
def test_equals_the_best_of_all_balances(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    counts = balance(costs, num_parts)
    assert len(counts) == num_parts
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert value(costs, counts) == min(
        value(costs, other) for other in every_balance(len(costs), num_parts)
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.data())
def test_scaling_by_a_power_of_two_changes_nothing_and_runs_repeat(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    counts = balance(costs, num_parts)
    assert counts == balance(costs, num_parts)
    if all(cost == 0 or cost > 1e-290 for cost in costs):
        assert counts == balance([cost * 4 for cost in costs], num_parts)


def test_ties_go_to_the_smaller_sum_of_squares():
    # The last item fixes the largest part at 10 whatever happens before it.
    assert balance([1, 1, 1, 1, 10], 3) == [2, 2, 1]


def test_decimal_costs_are_not_moved_by_rounding():
    # As floats 0.1 + 0.2 + 0.3 depends on the order of addition; as exact numbers it does not.
    assert balance([0.1] * 12, 4) == [3, 3, 3, 3]


def test_more_parts_never_have_a_larger_largest_part():
    costs = [math.sin(index) ** 2 for index in range(40)]
    largest = [value(costs, balance(costs, parts))[0] for parts in range(1, 41)]
    assert largest == sorted(largest, reverse=True)


def test_a_long_chain_of_equal_items_is_cut_evenly():
    assert balance([1.0] * 6400, 64) == [100] * 64


@pytest.mark.parametrize(
    ("costs", "num_parts", "said"),
    [
        ([], 1, "no layers"),
        ([1.0, 2.0], 3, "2 layers into 3 parts"),
        ([1.0, 2.0], 0, "0 parts"),
        ([1.0, -0.5], 1, r"costs\[1\] is -0.5"),
        ([math.nan], 1, r"costs\[0\] is nan"),
        ([1.0, math.inf], 2, r"costs\[1\] is inf"),
    ],
)
def test_what_cannot_be_balanced_is_refused(costs, num_parts, said):
    with pytest.raises(InvalidInput, match=said):
        balance(costs, num_parts)


@pytest.mark.parametrize("seed", range(40))
def test_devices_of_unequal_speed_get_the_least_slowest_stage(seed):
    """Even work on uneven devices was called optimal; here all cuts are tried."""
    draw = random.Random(seed)
    profile = chain_profile([draw.choice([0.0, 1.0, draw.random()]) for _ in range(6)])
    speeds = [draw.choice([0.01, 1.0, 3.0]) for _ in range(4)]
    devices = tuple(Device(name=f"d{index}", speed=speed) for index, speed in enumerate(speeds))
    cluster = Cluster(devices=devices, levels=(LinkLevel(group_size=4),))
    again = draw.choice(["never", "always"])
    work_s = [entry.forward.median_s * (3 + (again == "always")) for entry in profile.layers]
    wanted = draw.choice([None, 2, 3, 4])
    options = PlanOptions(objective="balance_time", recompute=again, num_stages=wanted)
    made = plan(profile, cluster, options)
    validate(made, profile, cluster)
    least_s = min(
        max(
            sum(work_s[first:last]) / speed
            for (first, last), speed in zip(pairwise([0, *inner, 6]), speeds, strict=False)
        )
        for count in ([wanted] if wanted else range(1, 5))
        for inner in combinations(range(1, 6), count - 1)
    )
    assert made.proof.value == pytest.approx(least_s, rel=1e-12)
    assert made.proof.status == "optimal"


def test_stages_that_lack_room_are_recomputed_where_that_is_allowed():
    """Stage 0 holds two micro-batches of 1000 bytes; with recomputation one, while at work."""
    profile = chain_profile([1, 1], saved_bytes=1000)
    cluster = Cluster.uniform(2, memory_bytes=1500)
    options = PlanOptions(objective="balance_time", num_microbatches=2)
    with pytest.raises(Infeasible, match=r"stage 0 needs 2\.0 KiB"):
        plan(profile, cluster, options)
    made = plan(profile, cluster, options.model_copy(update={"recompute": "auto"}))
    validate(made, profile, cluster)
    assert [stage.recompute for stage in made.stages] == ["always", "never"]
    assert (made.proof.lower_bound, made.proof.value, made.proof.status) == (3, 4, "feasible")


@pytest.mark.parametrize("objective", ["balance_time", "balance_size"])
def test_cuts_between_groups_of_layers_are_not_called_optimal(objective):
    """Too many layers for the tables: 13 stages of 100 layers each are not among the cuts."""
    profile = chain_profile([1.0] * 1300, parameter_bytes=4)
    options = PlanOptions(objective=objective, num_microbatches=13)
    made = plan(profile, "13xcpu", options, deadline_s=5)
    assert made.proof.value > {"balance_time": 300, "balance_size": 400}[objective]
    assert made.proof.lower_bound <= {"balance_time": 300, "balance_size": 400}[objective]
    assert made.proof.status == "feasible"
