"""The planner against brute force over every plan there is, on small problems."""

import math

import pytest

from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.planner.plan import plan
from stagewright.planner.validate import split_of, validate

from .instances import instance
from .oracle import least, usable_plans

ROUNDING = 1e-10

SEEDS = 25
CHUNKS = range(20)
"""Problems of one test, and tests of one objective: 500 problems each."""

OBJECTIVES = ["step_time", "throughput", "latency", "memory", "devices"]


def seeds(chunk):
    return range(chunk * SEEDS, (chunk + 1) * SEEDS)


def planned(problem):
    """The plan, checked; `None` where there is none."""
    try:
        made = plan(problem.profile, problem.cluster, problem.options)
    except Infeasible:
        return None
    except InvalidInput as error:
        if "micro-batches" not in str(error):
            raise
        return None  # more 1F1B stages asked for than micro-batches
    validate(made, problem.profile, problem.cluster)
    return made


def is_close(one, other):
    return math.isclose(one, other, rel_tol=ROUNDING)


def prices_ties_roughly(problem):
    """Whether the bound takes a tied weight to be summed over the fastest link there is."""
    tied = any(len(entry.layers) > 1 and entry.trainable for entry in problem.profile.parameters)
    return (
        tied
        and problem.options.objective == "step_time"
        and problem.options.tied == "priced"
        and len(problem.cluster.levels) > 1
    )


def check_exact(problem, seed, *, is_model):
    """The bound is the least of all plans' objectives.

    ``is_model``: the plan is chosen by its simulated step, so its own objective may be above.
    """
    made, best = planned(problem), least(problem)
    assert (made is None) == (best is None), seed
    if made is None:
        return
    if prices_ties_roughly(problem):
        assert made.proof.lower_bound <= best.rank[0] * (1 + ROUNDING), (seed, made.proof, best)
    else:
        assert is_close(made.proof.lower_bound, best.rank[0]), (seed, made.proof, best)
    if is_model:
        assert made.proof.value >= best.rank[0] * (1 - ROUNDING), (seed, made.proof, best)
    else:
        assert is_close(made.proof.value, best.rank[0]), (seed, made.proof, best)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bound_of_a_step_is_the_least_of_all(schedule, chunk):
    for seed in seeds(chunk):
        check_exact(instance(seed, schedule=schedule), seed, is_model=True)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_the_plan_is_the_least_of_all(objective, chunk):
    for seed in seeds(chunk):
        check_exact(instance(seed, objective=objective), seed, is_model=False)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_inputs_give_the_same_plan_bit_for_bit(objective):
    for seed in range(40):
        problem = instance(seed, objective=objective)
        one, other = planned(problem), planned(problem)
        assert (one is None) == (other is None)
        assert one is None or one.to_json() == other.to_json()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_usable_plan_is_simulated_faster_than_the_bound(schedule):
    for seed in range(60):
        problem = instance(seed, schedule=schedule)
        made = planned(problem)
        if made is None:
            continue
        bound_s = made.proof.simulated_lower_bound_s
        assert bound_s <= min(split.bound_s() for split in usable_plans(problem)) * (
            1 + ROUNDING
        ), seed
        for number, split in enumerate(usable_plans(problem)):
            if number % 20 == 0:
                assert bound_s <= split.step_time_s() * (1 + ROUNDING), seed


@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory", "devices"])
def test_exactly_enough_memory_works_and_one_byte_less_does_not(objective):
    for seed in range(60):
        asked = {"objective": objective, "memory_fraction": 1.0}
        problem = instance(seed, **asked).limited(None)
        smallest = least(problem, "memory")
        if smallest is None:
            continue
        needed = smallest.rank[0]
        made = planned(problem.limited(needed))
        assert made is not None, seed
        assert max(stage.memory.total_bytes for stage in made.stages) == needed
        with pytest.raises(Infeasible) as caught:
            plan(problem.profile, problem.limited(needed - 1).cluster, problem.options)
        assert caught.value.constraint == "memory"


@pytest.mark.parametrize("objective", ["memory", "devices"])
def test_the_step_time_decides_between_equals(objective):
    for seed in range(100):
        problem = instance(seed, objective=objective)
        made, best = planned(problem), least(problem)
        if made is None:
            continue
        split = split_of(made, problem.profile, problem.cluster)
        assert is_close(split.step_model_s(), best.rank[1]), (seed, made, best)
