"""The planner against brute force over every plan there is, on small problems."""

import math
from collections import Counter
from functools import cache

import pytest

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.search import branch_and_bound as search
from stagewright.planner.validation.validate import to_reference_split, validate
from tests.builders import chain_profile
from tests.planner.instances import (
    Instance,
    instance,
    patterned_instance,
    plan_alone,
    replicated_instance,
    search_alone,
    summed_instance,
    wide_instance,
    with_figures,
)
from tests.planner.oracle import least, usable_plans

ROUNDING = 1e-10

SEEDS = 26
CHUNKS = range(10)
"""Problems of one test, and tests of one objective: 260 problems each."""

MAKERS = (
    instance,
    wide_instance,
    replicated_instance,
    instance,
    wide_instance,
    patterned_instance,
)

OBJECTIVES = ["step_time", "throughput", "latency", "memory", "devices"]


def problem(seed, **asked):
    """In turn: every option; many devices, kinds and levels; many replicas; uneven kinds."""
    return MAKERS[seed % len(MAKERS)](seed, **asked)


def seeds(chunk):
    return range(chunk * SEEDS, (chunk + 1) * SEEDS)


def planned(given):
    """The plan, checked; `None` where there is none."""
    found = searched(given)
    return found and found.plan


def searched(given):
    """The plan, checked, and what the exact search proved; `None` where there is none."""
    try:
        found = search_alone(given)
    except Infeasible:
        return None
    except InvalidInput as error:
        if not (error.field or "").startswith("/options/"):
            raise
        return None  # options that contradict each other, for brute force as well
    validate(found.plan, given.profile, given.cluster)
    return found


def is_close(one, other):
    return math.isclose(one, other, rel_tol=ROUNDING)


def prices_ties_roughly(given):
    """Whether the bound takes a tied weight to be summed over the fastest link there is."""
    tied = any(len(entry.layers) > 1 and entry.trainable for entry in given.profile.parameters)
    return (
        tied
        and given.options.objective == "step_time"
        and given.options.tied == "priced"
        and len(given.cluster.levels) > 1
    )


def check_exact(given, seed, *, is_model):
    """The bound is the least of all plans' objectives.

    ``is_model``: the search minimises a closed form of the step, and the plan is chosen by its
    simulated step, so its own closed form may be above.
    """
    found, best = searched(given), least(given)
    assert (found is None) == (best is None), seed
    if found is None:
        return
    if prices_ties_roughly(given):
        assert found.lower_bound <= best.rank[0] * (1 + ROUNDING), (seed, found, best)
    else:
        assert is_close(found.lower_bound, best.rank[0]), (seed, found, best)
    if is_model:
        assert found.best_value >= best.rank[0] * (1 - ROUNDING), (seed, found, best)
    else:
        assert is_close(found.plan.proof.value, best.rank[0]), (seed, found, best)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bound_of_a_step_is_the_least_of_all(schedule, chunk):
    for seed in seeds(chunk):
        check_exact(problem(seed, schedule=schedule), seed, is_model=True)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_the_plan_is_the_least_of_all(objective, chunk):
    for seed in seeds(chunk):
        check_exact(problem(seed, objective=objective), seed, is_model=False)


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("objective", ["step_time", "throughput", "devices"])
def test_the_plan_is_the_least_of_all_where_more_replicas_may_sum_faster(objective, chunk):
    for seed in seeds(chunk):
        for given in (
            summed_instance(seed, objective=objective),
            with_figures(seed, problem(seed, objective=objective, max_replicas=None)),
        ):
            check_exact(given, seed, is_model=objective == "step_time")


SHARINGS = [("replicate", "zero1"), ("fully_shard",), ("replicate", "zero1", "fully_shard")]


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory", "devices"])
def test_the_plan_is_the_least_of_all_where_replicas_share(objective, chunk):
    shared = 0
    for seed in range(5000 + chunk * SEEDS, 5000 + (chunk + 1) * SEEDS):
        given = problem(
            seed,
            objective=objective,
            strategies=SHARINGS[seed % 3],
            max_replicas=None,
            optimizer="adam",
        )
        check_exact(given, seed, is_model=objective == "step_time")
        made = planned(given)
        shared += made is not None and any(
            stage.strategy in SHARINGS[2][1:] for stage in made.stages
        )
    assert shared > 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_numba_the_plan_is_the_least_of_all(objective, monkeypatch):
    monkeypatch.setenv("STAGEWRIGHT_NUMBA", "0")
    for seed in range(1000, 1000 + len(MAKERS)):
        given = problem(seed, objective=objective)
        check_exact(given, seed, is_model=objective == "step_time")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_boxes_halved_before_they_are_solved_hide_no_plan(schedule, monkeypatch):
    """A search that takes long is given up and its box halved; here, after eight labels.

    The best plan known is taken for a worse one, so that it has to be found again in some box.
    """
    halved, optimal = [], 0
    opened, narrowed = search.BranchAndBound._open_box, search.BranchAndBound.narrow

    def open_box(self, *box):
        before = len(self.open)
        nexts = opened(self, *box)
        halved.extend(entry for entry in self.open[before:] if not entry.is_solved)
        return nexts

    def narrow(self, tolerance):
        lower = narrowed(self, tolerance)
        self.best_value *= 1.02
        return lower

    monkeypatch.setattr(search, "SPLIT_LABELS", 8)
    monkeypatch.setattr(search, "SPLIT_PER_ARC", 0)
    monkeypatch.setattr(search.BranchAndBound, "narrow", narrow)
    monkeypatch.setattr(search.BranchAndBound, "_open_box", open_box)
    for seed in range(2000, 2040):
        given = problem(seed, schedule=schedule)
        found, best = searched(given), least(given)
        assert (found is None) == (best is None), seed
        if found is None:
            continue
        assert found.lower_bound <= best.rank[0] * (1 + ROUNDING), (seed, found, best)
        is_proven = is_close(found.lower_bound, found.best_value)
        if is_proven and not prices_ties_roughly(given):
            assert is_close(found.best_value, best.rank[0]), (seed, found, best)
            optimal += 1
    assert optimal > 20, optimal
    assert len(halved) > 10, len(halved)


@pytest.mark.parametrize("is_compiled", ["0", "1"])
def test_replicas_may_take_partial_groups_of_several_levels(is_compiled, monkeypatch):
    """Eleven devices in threes and sixes: the last stage takes three and one of the next three.

    Counts that take the class's last, partial group were tried beyond whole groups of the
    outermost level but one only, and a worse plan was called optimal.
    """
    monkeypatch.setenv("STAGEWRIGHT_NUMBA", is_compiled)
    levels = tuple(
        LinkLevel(group_size=size, latency_s=0, bandwidth_bytes_per_s=1e9) for size in (3, 6, 12)
    )
    given = Instance(
        chain_profile([6e-3, 4e-3], parameter_bytes=4),
        Cluster(devices=Cluster.uniform(11).devices, levels=levels),
        PlanOptions(objective="throughput", max_replicas=None, num_stages=2, num_microbatches=60),
    )
    check_exact(given, None, is_model=False)
    assert [stage.replicas for stage in planned(given).stages] == [6, 4]


@pytest.mark.parametrize("is_compiled", ["0", "1"])
@pytest.mark.parametrize(("seed", "objective"), [(5, "latency"), (10, "throughput")])
def test_labels_in_different_inner_groups_are_kept_apart(seed, objective, is_compiled, monkeypatch):
    """A kind in whole pairs but unequal sixes.

    Labels were compared by where they stand in a group of the outermost level but one. That
    counts one device where groups hold unequal numbers, so all stood alike, and one that ended
    inside a pair was given up for one that did not.
    """
    monkeypatch.setenv("STAGEWRIGHT_NUMBA", is_compiled)
    check_exact(patterned_instance(seed, objective=objective), seed, is_model=False)


def test_every_feature_is_in_a_share_of_the_problems():
    """Of 100, and of their best plans: what is never there is never checked."""
    counts = Counter()
    for seed in range(100):
        given = problem(seed)
        devices, levels = given.cluster.devices, given.cluster.levels
        classes = group_devices(given.cluster, given.options).classes
        best = least(given)
        split = best.split if best else None
        counts += Counter(
            {
                "levels": len(levels) > 1,
                "three levels": len(levels) > 2,
                "partial last group": any(len(devices) % level.group_size for level in levels[:-1]),
                "shared links": any(level.shared for level in levels),
                "kinds": len(classes) > 1,
                "speeds": len({device.speed for device in devices}) > 1,
                "limits": any(device.memory_bytes is not None for device in devices),
                "pins": bool(given.options.pins),
                "together": bool(given.options.together),
                "num_stages": given.options.num_stages is not None,
                "replicas": bool(split) and max(map(len, split.devices)) > 1,
                "recomputed": bool(split) and any(split.recompute),
                "several stages": bool(split) and split.num_stages > 1,
                "no plan": split is None,
            }
        )
    rare = {"pins": 2, "together": 2, "no plan": 2, "num_stages": 5}
    assert len(counts) == 14
    assert all(count >= rare.get(name, 20) for name, count in counts.items()), counts


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_inputs_give_the_same_plan_bit_for_bit(objective):
    for seed in range(12):
        given = problem(seed, objective=objective)
        one, other = planned(given), planned(given)
        assert (one is None) == (other is None)
        assert one is None or one.to_json() == other.to_json()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_usable_plan_is_simulated_faster_than_the_bound(schedule):
    for seed in range(20):
        given = instance(seed, schedule=schedule)
        made = planned(given)
        if made is None:
            continue
        bound_s = made.proof.simulated_lower_bound_s
        # The bound may be above the reference's own for a plan, but above no plan's step.
        for number, split in enumerate(usable_plans(given)):
            step_s = split.step_time_s()
            assert split.bound_s() <= step_s * (1 + ROUNDING), seed
            assert bound_s <= step_s * (1 + ROUNDING), (seed, number)


@cache
def least_bytes(seed):
    """What the fullest device of any plan needs at least, whatever is asked for but latency."""
    smallest = least(problem(seed, objective="memory", memory_fraction=1.0).limited(None))
    return None if smallest is None else smallest.rank[0]


@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory", "devices"])
def test_exactly_enough_memory_works_and_one_byte_less_does_not(objective):
    for seed in range(18):
        asked = {"objective": objective, "memory_fraction": 1.0}
        given = problem(seed, **asked).limited(None)
        needed = least_bytes(seed)
        if needed is None:
            continue
        made = planned(given.limited(needed))
        assert made is not None, seed
        assert max(stage.memory.total_bytes for stage in made.stages) == needed
        with pytest.raises(Infeasible) as caught:
            plan_alone(given.limited(needed - 1))
        assert caught.value.constraint == "memory"


@pytest.mark.parametrize("objective", ["memory", "devices"])
def test_the_step_time_decides_between_equals(objective):
    for seed in range(30):
        given = problem(seed, objective=objective)
        made, best = planned(given), least(given)
        if made is None:
            continue
        split = to_reference_split(made, given.profile, given.cluster)
        assert is_close(split.step_model_s(), best.rank[1]), (seed, made, best)
