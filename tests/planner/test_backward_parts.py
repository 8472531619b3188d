"""Backwards measured in two parts: schedules that split them take both as they were measured."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.merge import merge
from stagewright.core.profile.profile import LossProfile, Profile, Timing
from stagewright.core.profile.scale import scale_profile
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.validation.validate import validate
from stagewright.schedules.traits import SPLIT_BACKWARD
from tests.builders import chain_profile
from tests.planner.instances import Instance, instance, search_alone, wide_instance
from tests.planner.oracle import usable_plans

ASSUMED = "halves of the backward are assumed"


def in_parts(profile: Profile, share, *, layers=None, factor: float = 1.0) -> Profile:
    """Measure these layers apart: ``share`` of the backward, a number or a function, is first."""
    made = []
    for index, entry in enumerate(profile.layers):
        if layers is None or index in layers:
            part = share() if callable(share) else share
            whole_s = entry.backward.median_s * factor
            parts = {
                "backward_input": Timing(median_s=whole_s * part),
                "backward_weight": Timing(median_s=whole_s * (1 - part)),
            }
            entry = entry.model_copy(update=parts)
        made.append(entry)
    return profile.model_copy(update={"layers": tuple(made)})


def options_of(schedule: str, **asked) -> PlanOptions:
    stages = {"zero_bubble": 4, "interleaved_zero_bubble": 8, "zbv": 8, "dualpipev": 8}
    return PlanOptions(schedule=schedule, num_microbatches=8, num_stages=stages[schedule], **asked)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_a_step_takes_as_long_as_its_parts(schedule, recompute):
    """Where gradients of inputs take most of it, stages in front begin their backwards late."""
    cluster, steps_s = Cluster.parse("4xcpu"), []
    for share in (0.2, 0.5, 0.8):
        profile = in_parts(chain_profile([1.0] * 8), share)
        made = plan(profile, cluster, options_of(schedule, recompute=recompute))
        validate(made, profile, cluster)
        assert not any(ASSUMED in note for note in made.notes)
        again_s = made.stages[0].forward_time_s * (recompute == "always")
        assert made.stages[0].backward_input_time_s == pytest.approx(
            share * (made.stages[0].backward_time_s - again_s) + again_s
        )
        steps_s.append(made.step_time_s)
    assert steps_s[2] > steps_s[1] * 1.05


def test_parts_that_take_longer_than_the_whole_are_taken_as_measured():
    profile = in_parts(chain_profile([1.0] * 4), 0.5, factor=1.2)
    made = plan(profile, "2xcpu", PlanOptions(schedule="zero_bubble", num_stages=2))
    assert made.stages[0].backward_time_s == pytest.approx(2.4 * made.stages[0].forward_time_s)
    whole = plan(profile, "2xcpu", PlanOptions(schedule="1f1b", num_stages=2))
    assert whole.stages[0].backward_time_s == pytest.approx(2 * whole.stages[0].forward_time_s)
    assert whole.stages[0].backward_input_time_s is None


@pytest.mark.parametrize(("layers", "lacking"), [((), 8), ((0, 3, 5), 5)])
def test_assumed_halves_are_said(layers, lacking):
    profile = in_parts(chain_profile([1.0] * 8), 0.7, layers=layers)
    made = plan(profile, "4xcpu", options_of("zero_bubble"))
    assert f"{ASSUMED} for {lacking} of 8 layers" in " ".join(made.notes)
    validate(made, profile, Cluster.parse("4xcpu"))
    assert ASSUMED not in " ".join(plan(profile, "4xcpu", PlanOptions()).notes)


def test_a_loss_has_no_weights():
    """All of its backward goes before the gradient that stages in front wait for."""
    loss = LossProfile(forward=Timing(median_s=0.0), backward=Timing(median_s=3.0))
    profile = in_parts(chain_profile([1.0] * 4), 0.5).model_copy(update={"loss": loss})
    made = plan_from_balance(profile, "2xcpu", PlanOptions(schedule="zero_bubble"), (2, 2))
    first, last = made.stages
    assert last.backward_input_time_s == pytest.approx(first.backward_input_time_s + 3.0)
    validate(made, profile, Cluster.parse("2xcpu"))


@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold_and_plans_validate_whatever_was_measured(seed):
    draw = random.Random(seed)
    schedule = draw.choice([*SPLIT_BACKWARD, "zero_bubble", "zero_bubble"])
    make = wide_instance if seed % 2 else instance
    given = make(seed, schedule=schedule, objective="step_time")
    layers = [index for index in range(len(given.profile.layers)) if draw.random() < 0.85]
    factor = draw.choice([0.9, 1.0, 1.1])
    profile = in_parts(given.profile, draw.random, layers=layers, factor=factor)
    given = Instance(profile, given.cluster, given.options)
    try:
        made = search_alone(given).plan
    except InvalidInput:  # of a request drawn at random
        return
    except Infeasible:
        # The oracle knows one stage a device.
        assert schedule != "zero_bubble" or next(usable_plans(given), None) is None
        return
    validate(made, given.profile, given.cluster)
    if schedule != "zero_bubble":
        return
    least_s = min(split.step_time_s() for split in usable_plans(given))
    assert made.proof.lower_bound <= least_s * (1 + 1e-9)
    if made.proof.status == "optimal":
        assert made.step_time_s <= least_s * (1 + 1e-9)


def sized(profile: Profile, samples: int) -> Profile:
    inputs = (TensorSpec(name="x", shape=(samples, 4), dtype="float32"),)
    return profile.model_copy(update={"inputs": inputs})


def test_scaled_and_merged_profiles_keep_their_parts():
    small = sized(in_parts(chain_profile([1.0] * 4), 0.7), 2)
    large = scale_profile(small, Fraction(2))
    four_times = sized(in_parts(chain_profile([4.0] * 4), 0.7), 8)
    between = merge([small, four_times], samples=4)
    for found in (large, between):
        for before, after in zip(small.layers, found.layers, strict=True):
            for name in ("backward", "backward_input", "backward_weight"):
                pair = getattr(before, name).median_s, getattr(after, name).median_s
                assert pair[1] == pytest.approx(2 * pair[0]), name
