"""The size of micro-batches, chosen with the plan: against every size planned on its own."""

import math
import random
from fractions import Fraction

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput, PlanMismatch
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.core.profile.scale import scale_profile
from stagewright.planner.microbatch_size import MAX_MICROBATCHES, MAX_SIZES, sizes_to_try
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile, random_cluster, random_profile, split_profile


def batched(profile, size=2):
    """The profile with that many samples in its first input."""
    inputs = (TensorSpec(name="x", shape=(size, 8), dtype="float32"),)
    return profile.model_copy(update={"inputs": inputs})


def each_size(profile, cluster, options):
    """Every plan of a size that divides the batch, made for that size alone."""
    size = profile.inputs[0].shape[0]
    for other in range(1, options.batch_size + 1):
        if options.batch_size % other == 0:
            count = options.batch_size // other
            alone = options.model_copy(update={"batch_size": None, "num_microbatches": count})
            try:
                yield count, plan(scale_profile(profile, Fraction(other, size)), cluster, alone)
            except (Infeasible, InvalidInput):
                continue


def may_be_chosen(objective, size, sizes):
    """Of those that fit: for speed none below the profiled size, or the largest of these."""
    if objective == "memory":
        return sizes
    large = [entry for entry in sizes if samples(entry) >= size]
    return large or [max(sizes, key=samples)]


def samples(entry):
    return entry[1].inputs[0].shape[0]


def value_of(objective, found, count):
    if objective == "step_time":
        return found.step_time_s
    return found.proof.value * (count if objective == "throughput" else 1)


@pytest.mark.parametrize("objective", ["step_time", "throughput", "memory"])
@pytest.mark.parametrize("seed", range(8))
def test_the_best_of_every_size(seed, objective):
    draw = random.Random(seed)
    profile = random_profile(seed, draw.randint(2, 6))
    cluster = random_cluster(seed, draw.randint(1, 4), memory_bytes=draw.choice([None, 40000]))
    options = PlanOptions(
        batch_size=draw.choice([4, 6, 8, 12]),
        objective=objective,
        schedule=draw.choice(["1f1b", "gpipe"]),
        max_replicas=draw.choice([1, None]),
        recompute=draw.choice(["never", "auto"]),
    )
    sizes = list(each_size(profile, cluster, options))
    if not sizes:
        with pytest.raises(Infeasible):
            plan(profile, cluster, options)
        return
    found = plan(profile, cluster, options)
    allowed = may_be_chosen(objective, profile.inputs[0].shape[0], sizes)
    best = min(value_of(objective, other, count) for count, other in allowed)
    assert found.estimated == (found.inputs != profile.inputs)
    value = value_of(objective, found, found.num_microbatches)
    assert value == pytest.approx(best, rel=1e-9)
    validate(found, profile, cluster)


def test_bubbles_ask_for_small_and_latency_for_large_microbatches():
    """Two equal stages: small micro-batches fill the pipeline, unless each costs a message."""
    profile = batched(chain_profile([0.5, 0.5], forward_bytes=8), 1)
    options = PlanOptions(batch_size=8)
    free = Cluster.uniform(2, latency_s=0.0, bandwidth_bytes_per_s=1e12)
    slow = Cluster.uniform(2, latency_s=2.0, bandwidth_bytes_per_s=1e12)
    # One sample takes a stage 1.5 s: 2 x 1.5 + 7 x 1.5 with eight micro-batches of one.
    assert plan(profile, free, options).step_time_s == pytest.approx(13.5)
    assert plan(profile, free, options).num_microbatches == 8
    assert plan(profile, slow, options).num_microbatches < 8


def test_one_profile_alone_keeps_its_size_and_says_so():
    """Cause: in proportion micro-batches of one sample cost a quarter, and always won."""
    profile = batched(chain_profile([1, 1]), 4)
    found = plan(profile, "2xcpu", PlanOptions(batch_size=64))
    assert (found.num_microbatches, found.options.num_microbatches) == (16, 16)
    assert found.options.batch_size == 64
    assert found.inputs[0].shape == (4, 8)
    assert found.profile_id == profile.content_id()
    assert not found.estimated
    assert "micro-batches of 4 were chosen from a profile of 4 alone" in found.notes[-1]


def test_a_size_nobody_measured_is_an_estimate():
    """Six samples are no fours; of three, two and one sample the largest is taken."""
    profile = batched(chain_profile([1, 1]), 4)
    larger = plan(profile, "2xcpu", PlanOptions(batch_size=6, schedule="gpipe"))
    assert (larger.inputs[0].shape, larger.estimated) == ((6, 8), True)
    assert "probably longer than they will be" in " ".join(larger.notes)
    few = plan(profile, "2xcpu", PlanOptions(batch_size=3))
    assert (few.inputs[0].shape, few.estimated) == ((3, 8), True)
    assert "scaled in proportion from micro-batches of 4 samples, which were profiled, to 3; the " \
        "times are probably shorter than they will be" in " ".join(few.notes)  # fmt: skip
    assert "ESTIMATED profile" in str(few)
    validate(few, profile, Cluster.parse("2xcpu"))


def test_both_numbers_say_the_size():
    profile = batched(chain_profile([1, 1]), 4)
    options = PlanOptions(batch_size=16, num_microbatches=8)
    found = plan(profile, "2xcpu", options)
    assert (found.inputs[0].shape, found.num_microbatches) == ((2, 8), 8)
    assert plan(profile, "2xcpu", PlanOptions(batch_size=16), num_microbatches=8) == found
    again = plan(profile, "2xcpu", found.options)
    assert again == found


def test_numbers_that_do_not_agree_are_refused():
    """Cause: the number of micro-batches was dropped without a word."""
    options = PlanOptions(batch_size=16, num_microbatches=3)
    with pytest.raises(
        InvalidInput, match="16 samples cannot be split into num_microbatches=3"
    ) as caught:
        plan(batched(chain_profile([1, 1])), "2xcpu", options)
    assert caught.value.field == "/options/num_microbatches"


def test_progress_of_several_sizes_never_gets_worse():
    for objective in ("step_time", "throughput", "memory", "devices"):
        seen = []
        options = PlanOptions(batch_size=24, objective=objective)
        made = plan(batched(random_profile(3, 8)), "3x1GB", options, progress=seen.append)
        values = [entry.value for entry in seen]
        assert values == sorted(values, reverse=True)
        assert all(entry.lower_bound == 0 for entry in seen)  # of one size says nothing of others
        count = made.num_microbatches if objective == "throughput" else 1
        assert values[-1] <= made.proof.value * count * (1 + 1e-9)


def test_a_size_that_was_measured_is_not_scaled():
    """Measured at four samples it takes as long as at one: so four it is."""
    one, four = batched(chain_profile([1, 1]), 1), batched(chain_profile([1, 1]), 4)
    found = plan([one, four], "2xcpu", PlanOptions(batch_size=16))
    assert "profiled were 1, 4" in found.notes[-1]
    assert found.num_microbatches in (1, 2, 4)
    assert found.profile_id == four.content_id()
    validate(found, four, Cluster.parse("2xcpu"))
    with pytest.raises(PlanMismatch, match="it was planned from"):
        validate(found, one, Cluster.parse("2xcpu"))
    alone = plan([four], "2xcpu", PlanOptions(batch_size=16, num_stages=2))
    assert alone.profile_id == four.content_id()


def test_sizes_between_are_scaled_from_the_nearest():
    one, four = batched(chain_profile([1, 1]), 1), batched(chain_profile([1, 1]), 4)
    options = PlanOptions(batch_size=8)
    by_hand = min(
        plan(profile, "2xcpu", num_microbatches=count).step_time_s
        for profile, count in (
            (one, 8),
            (scale_profile(one, Fraction(2)), 4),  # as near to four: the smaller one decides
            (four, 2),
            (scale_profile(four, Fraction(2)), 1),
        )
    )
    assert plan([four, one], "2xcpu", options).step_time_s == pytest.approx(by_hand)


def test_what_does_not_fit_is_left_out_and_the_smallest_is_told_about():
    profile = batched(chain_profile([1, 1], saved_bytes=1000), 4)
    options = PlanOptions(batch_size=8, num_stages=1)
    assert plan(profile, Cluster.uniform(1, memory_bytes=1000), options).inputs[0].shape[0] == 2
    assert plan(profile, Cluster.uniform(1, memory_bytes=999), options).inputs[0].shape[0] == 1
    with pytest.raises(Infeasible) as caught:
        plan(profile, Cluster.uniform(1, memory_bytes=499), options)
    assert (caught.value.required, caught.value.available) == (500, 499)


def test_validate_refuses_a_plan_of_other_samples():
    profile = batched(chain_profile([1, 1]), 4)
    found = plan(profile, "2xcpu", PlanOptions(batch_size=8))
    wrong = found.model_copy(
        update={"options": found.options.model_copy(update={"batch_size": 16})}
    )
    with pytest.raises(PlanMismatch, match="batch_size is 16, expected 8"):
        validate(wrong, profile, Cluster.parse("2xcpu"))


def test_scaling_grows_everything_but_the_parameters():
    profile = random_profile(3, 5)
    twice = scale_profile(profile, Fraction(2))
    assert twice.parameters == profile.parameters
    assert twice.inputs[0].shape == (4, 8)
    for one, other in zip(profile.layers, twice.layers, strict=True):
        assert other.layer == one.layer
        assert other.forward.median_s == 2 * one.forward.median_s
        assert other.workspace_bytes == 2 * one.workspace_bytes
    assert [entry.size_bytes for entry in twice.storages] == [
        2 * entry.size_bytes for entry in profile.storages
    ]
    half = scale_profile(profile, Fraction(1, 2))
    assert [entry.size_bytes for entry in half.storages] == [
        math.ceil(entry.size_bytes / 2) for entry in profile.storages
    ]
    assert scale_profile(profile, Fraction(1)) is profile
    Profile.model_validate(twice.model_dump())


def test_a_tensor_without_the_batch_keeps_its_shape():
    tensors = {(4, 16): (8, 16), (7, 4, 3): (7, 8, 3), (12, 5): (24, 5), (3, 3): (3, 3), (): ()}
    boundary = chain_profile([1, 1]).boundaries[0].model_copy(
        update={
            "tensors": tuple(
                TensorSpec(name=f"t{index}", shape=shape, dtype="float32")
                for index, shape in enumerate(tensors)
            )
        }
    )  # fmt: skip
    profile = batched(chain_profile([1, 1]), 4).model_copy(update={"boundaries": (boundary,)})
    found = scale_profile(profile, Fraction(2)).boundaries[0].tensors
    assert [tensor.shape for tensor in found] == list(tensors.values())


def test_sizes_are_few_and_near_the_measured_one():
    assert sorted(sizes_to_try(12, (3,))) == [1, 2, 3, 4, 6, 12]
    assert sizes_to_try(12, (3,))[:3] == [3, 6, 12]
    many = sizes_to_try(7 * 2**12, (2,))
    assert len(many) == MAX_SIZES
    assert many[0] == 2
    assert {2**power for power in range(7)} <= set(many)
    assert all(2**30 // size <= MAX_MICROBATCHES for size in sizes_to_try(2**30, (1,)))


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ([chain_profile([1])], "known micro-batch size"),
        ([batched(chain_profile([1])), batched(chain_profile([2]))], "same micro-batch size"),
        ([batched(chain_profile([1]), 1), batched(chain_profile([1, 1]))], "different layers"),
        ([], "at least one profile"),
    ],
)
def test_profiles_that_cannot_be_used_are_refused(profiles, said):
    with pytest.raises(InvalidInput, match=said):
        plan(profiles, "1xcpu", PlanOptions(batch_size=4))


def test_several_profiles_need_a_batch():
    with pytest.raises(InvalidInput, match="give a batch_size"):
        plan([batched(chain_profile([1]), 1), batched(chain_profile([1]))], "1xcpu")


@pytest.mark.parametrize("changed", [{"recompute": "layers"}, {"tensor": 2}])
def test_a_plan_of_changed_costs_names_the_profile_that_was_measured(changed):
    """The first profile was named, whichever the plan was made from."""
    slow, fast = batched(split_profile(), 2), batched(split_profile(), 4)  # as long for twice
    made = plan([slow, fast], "2x80GB", PlanOptions(batch_size=8, **changed))
    validate(made, fast, "2x80GB")
