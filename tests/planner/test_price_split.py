"""A split somebody chose is costed and checked like a planned one."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.validation.validate import validate
from tests.builders import boundary, chain_profile, random_profile


def test_a_planned_balance_gets_the_planned_numbers():
    for seed in range(20):
        profile, cluster = random_profile(seed, 8), Cluster.uniform(4)
        made = plan(profile, cluster)
        again = plan_from_balance(profile, cluster, None, made.balance)
        validate(again, profile, cluster)
        assert again.stages == made.stages
        assert again.boundaries == made.boundaries
        assert again.profile_id == made.profile_id == profile.content_id()
        assert again.step_time_s == made.step_time_s
        assert again.proof.lower_bound <= made.proof.lower_bound * (1 + 1e-12)


def test_a_worse_balance_is_slower_and_says_so():
    made = plan_from_balance(chain_profile([1, 1, 1, 9]), Cluster.uniform(2), None, [2, 2])
    assert made.proof.status == "feasible"
    assert made.proof.gap > 0
    assert "takes the same time" in str(made)
    made = plan_from_balance(chain_profile([1, 1, 1, 9]), Cluster.uniform(2), None, [1, 3])
    assert "slower" in str(made)


@pytest.mark.parametrize("balance", [[4, 4], [], [0, 3], [4, -1], [1, 1]])
def test_a_balance_that_does_not_cover_the_layers_is_refused(balance):
    with pytest.raises(InvalidInput, match="3 in all"):
        plan_from_balance(chain_profile([1, 1, 1]), Cluster.uniform(2), None, balance)


def test_an_illegal_cut_is_refused_with_its_reason():
    profile = chain_profile([1, 1])
    gaps = (boundary(0, legal=False),)
    profile = type(profile).model_validate({**dict(profile), "boundaries": gaps})
    with pytest.raises(InvalidInput, match=r"'layer.0' and 'layer.1': a test forbids it"):
        plan_from_balance(profile, Cluster.uniform(2), None, [1, 1])


def test_too_many_stages_and_too_little_memory_are_infeasible():
    profile = chain_profile([1, 1], saved_bytes=100)
    with pytest.raises(Infeasible, match="2 stages need 2 devices"):
        plan_from_balance(profile, Cluster.uniform(1), None, [1, 1])
    cluster = Cluster.uniform(2, memory_bytes=199)
    with pytest.raises(Infeasible, match=r"stage 0 .* \(200 bytes\), .* \(199 bytes\)"):
        plan_from_balance(profile, cluster, None, [1, 1])


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_a_device_must_hold_all_of_its_stages_at_once(schedule):
    """Each stage used to be compared with the whole device: twice the memory passed."""
    profile = chain_profile([1] * 4, saved_bytes=100, parameter_bytes=1000)
    options = PlanOptions(schedule=schedule, num_microbatches=2)
    made = plan_from_balance(profile, Cluster.uniform(2), options, [1] * 4)
    peak = max(made.memory_by_device().values())
    assert peak > max(stage.memory.total_bytes for stage in made.stages)
    enough = Cluster.uniform(2, memory_bytes=peak)
    validate(plan_from_balance(profile, enough, options, [1] * 4), profile, enough)
    with pytest.raises(Infeasible, match="with its other stages") as error:
        plan_from_balance(profile, Cluster.uniform(2, memory_bytes=peak - 1), options, [1] * 4)
    # What is said to be needed is all of it, however many stages come behind the first too many.
    assert (error.value.required, error.value.available) == (peak, peak - 1)
    with pytest.raises(Infeasible) as error:
        plan_from_balance(profile, Cluster.uniform(2, memory_bytes=1), options, [1] * 4)
    assert error.value.required == made.memory_by_device()["device:0"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_there_may_be_more_stages_than_microbatches(schedule):
    """torch's Schedule1F1B would not run it, and plans used to be refused for that."""
    profile, cluster = chain_profile([1, 1, 1]), Cluster.uniform(3)
    options = PlanOptions(num_microbatches=2, num_stages=3, schedule=schedule)
    validate(plan_from_balance(profile, cluster, options, [1, 1, 1]), profile, cluster)


def test_the_balance_must_have_the_number_of_stages_asked_for():
    with pytest.raises(InvalidInput, match="2 stages but the options ask for 1"):
        plan_from_balance(
            chain_profile([1, 1]), Cluster.uniform(2), PlanOptions(num_stages=1), [1, 1]
        )


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({"pins": (Pin(layer="layer.2", stage=0),)}, "/options/pins", "has 'layer.2' in stage 1"),
        ({"max_stages": 1}, "/options/max_stages", "2 stages, more than max_stages=1"),
        ({"together": (("layer.0", "layer.3"),)}, "/balance", "'layer.1' and 'layer.2': the opt"),
        ({"no_cut_after": ("layer.1",)}, "/balance", "the options do"),
    ],
)
def test_options_a_balance_does_not_keep_are_named(asked, field, said):
    with pytest.raises(InvalidInput, match=said) as caught:
        plan_from_balance(chain_profile([1] * 4), "2xcpu", PlanOptions(**asked), [2, 2])
    assert caught.value.field == field
