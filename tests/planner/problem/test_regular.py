"""Regular plans and cuts at blocks: the best of all plans that keep the rule, and their price."""

import re

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput, PlanMismatch
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.explain import explain
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import to_reference_split, validate
from tests.builders import chain_profile
from tests.planner.instances import Instance, instance, search_alone, wide_instance
from tests.planner.oracle import usable_plans
from tests.planner.test_exact import prices_ties_roughly

ROUNDING = 1e-9

NAMES = ("embed", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "head")
"""Of up to six layers: two blocks of two, with something before and behind them."""

BLOCK_CUTS = {1, 3, 5}


def renamed(problem):
    """The instance with its layers called as those of blocks."""
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(problem.profile.layers, NAMES, strict=False)
    )
    old = [entry.layer.name for entry in problem.profile.layers]
    new = dict(zip(old, NAMES, strict=False))
    profile = Profile.model_validate({**dict(problem.profile), "layers": layers})
    options = {
        "together": tuple((new[one], new[other]) for one, other in problem.options.together),
        "no_cut_after": tuple(new[name] for name in problem.options.no_cut_after),
        "pins": tuple(
            pin.model_copy(update={"layer": new[pin.layer]}) for pin in problem.options.pins
        ),
    }
    return Instance(profile, problem.cluster, problem.options).asked(**options)


def is_grid(split):
    return len({len(devices) for devices in split.devices}) == 1


def cuts(split):
    return [sum(split.counts[:stage]) for stage in range(1, len(split.counts))]


def is_at_blocks(split):
    return set(cuts(split)) <= BLOCK_CUTS


def has_equal_blocks(split):
    """Of two blocks: one stage, or a cut between the two."""
    return is_grid(split) and cuts(split) in ([], [3])


def check_best(problem, rule, keeps):
    """The bound is the least of all plans that keep the rule; return if there is such a plan."""
    of_step = problem.options.objective == "step_time"
    values, steps = [], []
    for split in usable_plans(problem, keeps):
        values.append(split.objective())
        steps.extend([split.step_time_s()] if of_step else [])
    try:
        found = search_alone(problem.asked(**rule))
    except (Infeasible, InvalidInput):
        assert not values
        return False
    assert values
    made = found.plan
    validate(made, problem.profile, problem.cluster)
    assert keeps(to_reference_split(made, problem.profile, problem.cluster))
    least, proof = min(values), made.proof
    assert found.lower_bound <= least * (1 + ROUNDING)
    if not prices_ties_roughly(problem):
        assert found.lower_bound == pytest.approx(least, rel=ROUNDING)
    assert found.best_value >= least * (1 - ROUNDING)
    if of_step:
        assert made.step_time_s >= min(steps) * (1 - ROUNDING)
        assert proof.simulated_lower_bound_s <= min(steps) * (1 + ROUNDING)
    else:
        assert proof.value == pytest.approx(least, rel=ROUNDING)
    return True


OBJECTIVES = ("step_time", "throughput", "latency", "memory", "devices")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("make", [instance, wide_instance])
def test_the_plan_is_the_best_of_all_grids(make, objective):
    found = sum(
        check_best(make(seed, objective=objective), {"regular": "grid"}, is_grid)
        for seed in range(24)
    )
    assert found > 8


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("rule", "keeps"),
    [
        ({"cut_at": "blocks"}, is_at_blocks),
        ({"regular": "equal_blocks"}, has_equal_blocks),
        (
            {"cut_at": "blocks", "regular": "grid"},
            lambda made: is_at_blocks(made) and is_grid(made),
        ),
    ],
)
def test_the_plan_is_the_best_of_all_cut_at_blocks(rule, keeps, objective):
    tried = found = 0
    for seed in range(60):
        problem = instance(seed, objective=objective, max_replicas=None)
        if len(problem.profile.layers) >= 4:
            tried += 1
            found += check_best(renamed(problem), rule, keeps)
    assert tried > 20
    assert found > 8


GPT = chain_profile(
    [2e-3, *[5e-3] * 12, 9e-3], parameter_bytes=2**24, forward_bytes=2**20, saved_bytes=2**20
)


def with_blocks(profile):
    names = ["embed", *(f"h.{number}" for number in range(12)), "head"]
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(profile.layers, names, strict=True)
    )
    return profile.model_copy(update={"layers": layers})


def test_a_preference_is_kept_within_its_tolerance_and_dropped_beyond():
    profile, asked = with_blocks(GPT), PlanOptions(num_stages=4, num_microbatches=32)
    free = plan(profile, "4xcpu", asked)
    rule = asked.model_copy(update={"regular": "equal_blocks"})
    regular = plan(profile, "4xcpu", rule)
    assert regular.balance == (4, 3, 3, 4)
    price = regular.step_time_s / free.step_time_s - 1
    assert price > 0.01
    for within, expected in ((price * 1.01, regular), (price * 0.99, free)):
        preference = rule.model_copy(update={"regular_within": within})
        made = plan(profile, "4xcpu", preference)
        assert made.options == expected.options
        assert made.balance == expected.balance
        # The proof is about all plans, whichever was taken.
        assert made.proof.lower_bound == pytest.approx(free.proof.lower_bound)
        assert f"{price:.1%} slower" in " ".join(made.notes)
        validate(made, profile, "4xcpu")


def test_explain_prices_the_rules():
    profile = with_blocks(GPT)
    options = PlanOptions(
        num_stages=4, num_microbatches=32, cut_at="blocks", regular="equal_blocks"
    )
    made = plan(profile, "4xcpu", options)
    found = {entry.text: entry for entry in explain(made, profile, "4xcpu").alternatives}
    free = plan(profile, "4xcpu", options.model_copy(update={"regular": "no"}))
    gain = 1 - free.step_time_s / made.step_time_s
    assert found["irregular plans allowed (no regular)"].gain == pytest.approx(gain)
    assert found["cuts inside blocks allowed (no cut_at)"].gain == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cut_at": "blocks"}, "cut_at='blocks' does not apply to this model: no layer is part"),
        ({"regular": "equal_blocks"}, "regular='equal_blocks' does not apply to this model"),
        ({"regular_within": 0.1}, "regular_within=0.1 has no effect with regular='no'"),
        ({"regular": "equal_blocks", "layer_order": "any"}, "in the profile's own order"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_by_name(asked, words):
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(GPT.layers, "abcdefghijklmn", strict=True)
    )
    with pytest.raises(InvalidInput, match=re.escape(words)):
        plan(GPT.model_copy(update={"layers": layers}), "4xcpu", PlanOptions(**asked))


def test_a_plan_against_the_rule_is_not_valid():
    profile = with_blocks(GPT)
    made = plan(profile, "4xcpu", PlanOptions(num_stages=4, num_microbatches=32))
    assert made.balance != (4, 3, 3, 4)
    options = made.options.model_copy(update={"regular": "equal_blocks"})
    with pytest.raises(PlanMismatch, match="despite regular='equal_blocks'"):
        validate(made.model_copy(update={"options": options}), profile, "4xcpu")


def test_stages_of_an_encoder_and_a_decoder_are_cut_between_their_blocks():
    names = ["encoder.0.a", "encoder.0.b", "encoder.1", "bridge", "decoder.0.a", "decoder.0.b"]
    profile = chain_profile([1e-3, 5e-3, 1e-3, 1e-3, 5e-3, 1e-3])
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(profile.layers, names, strict=True)
    )
    profile = profile.model_copy(update={"layers": layers})
    for num_stages, balance in ((4, (2, 1, 1, 2)), (2, (3, 3))):
        options = PlanOptions(num_stages=num_stages, cut_at="blocks")
        assert plan(profile, "4xcpu", options).balance == balance
    with pytest.raises(InvalidInput, match="2 stacks of blocks"):
        plan(profile, "4xcpu", PlanOptions(regular="equal_blocks"))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_every_schedule_keeps_equal_blocks(schedule):
    profile = with_blocks(GPT)
    options = PlanOptions(schedule=schedule, regular="equal_blocks", num_microbatches=8)
    made = plan(profile, Cluster.uniform(6), options)
    validate(made, profile, Cluster.uniform(6))
    assert made.num_stages > 1
