"""What a caller of `plan` relies on."""

import math
import random

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Provenance
from stagewright.planner.cost.assignment import place_in_device_order
from stagewright.planner.cost.chain import chain_costs, legal_positions
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.cost.plan_cost import CostModel
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.validation.validate import validate
from tests.builders import boundary, chain_profile, random_cluster, random_profile
from tests.planner.instances import Instance
from tests.planner.oracle import least, usable_plans


def instance(seed):
    draw = random.Random(seed)
    profile = random_profile(seed, draw.randrange(2, 10), ties=draw.choice([0, 1, 2]))
    memory = draw.choice([None, None, 60_000, 120_000])
    cluster = random_cluster(seed, draw.randrange(1, 6), memory_bytes=memory)
    options = PlanOptions(
        num_microbatches=draw.choice([1, 3, 8]), schedule=draw.choice(["1f1b", "gpipe"])
    )
    return profile, cluster, options


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_validates_and_repeats_bit_for_bit(seed):
    profile, cluster, options = instance(seed)
    try:
        made = plan(profile, cluster, options)
    except Infeasible:
        assert next(usable_plans(Instance(profile, cluster, options)), None) is None
        return
    validate(made, profile, cluster)
    assert plan(profile, cluster, options).to_json() == made.to_json()
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("seed", range(40))
def test_the_proof_is_brute_forces(seed):
    """No plan's simulated step is below its bound, and an optimal plan's is above none."""
    profile, cluster, options = instance(seed)
    steps_s = [each.step_time_s() for each in usable_plans(Instance(profile, cluster, options))]
    if not steps_s:
        return
    made = plan(profile, cluster, options)
    assert made.proof.value == made.step_time_s
    assert made.proof.lower_bound <= min(steps_s) * (1 + 1e-11)
    assert made.proof.lower_bound == made.proof.simulated_lower_bound_s
    if made.proof.status == "optimal":
        assert made.step_time_s == pytest.approx(min(steps_s), rel=1e-11)
    assert made.proof.gap == made.simulated_gap


@pytest.mark.parametrize("seed", range(40))
def test_never_slower_than_equal_layer_counts_on_as_many_or_fewer_devices(seed):
    profile, cluster, options = instance(seed)
    try:
        made = plan(profile, cluster, options)
    except Infeasible:
        return
    for num_stages in range(1, len(cluster.devices) + 1):
        each, more = divmod(len(profile.layers), num_stages)
        counts = [each + (stage < more) for stage in range(num_stages)]
        try:
            equal = plan_from_balance(profile, cluster, options, counts)
        except (Infeasible, InvalidInput):
            continue
        assert made.step_time_s <= equal.step_time_s
        if num_stages == made.num_stages > 1:
            assert made.baseline("equal_layers").step_time_s == equal.step_time_s


def test_more_devices_are_never_slower():
    for seed in range(5):
        profile = random_profile(seed, 8)
        times = [
            plan(profile, Cluster.uniform(count, bandwidth_bytes_per_s=1e7)).step_time_s
            for count in range(1, 9)
        ]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(12))
def test_exactly_enough_memory_works_and_one_byte_less_does_not(seed, schedule):
    profile = random_profile(seed, 7, ties=1)
    options = PlanOptions(num_microbatches=4, schedule=schedule, num_stages=3 - seed % 2)
    roomy = Cluster.uniform(3, memory_bytes=10**9)
    if len([gap for gap in profile.boundaries if gap.legal]) < 2:
        return
    needed = least(Instance(profile, roomy, options), "memory").rank[0]
    enough = Cluster.uniform(3, memory_bytes=needed)
    made = plan(profile, enough, options)
    validate(made, profile, enough)
    assert max(stage.memory.total_bytes for stage in made.stages) == needed
    with pytest.raises(Infeasible, match=str(needed)) as caught:
        plan(profile, Cluster.uniform(3, memory_bytes=needed - 1), options)
    assert caught.value.constraint == "memory"
    assert (caught.value.required, caught.value.available) == (needed, needed - 1)


def test_a_smaller_device_gets_the_stage_that_fits_it():
    """Two devices of different size: the split that ignores sizes does not fit."""
    profile = chain_profile([1, 1, 1, 1], saved_bytes=100)
    options = PlanOptions(num_microbatches=2, num_stages=2, optimizer="none")
    even = Cluster.uniform(2)
    assert plan(profile, even, options).balance == (2, 2)
    devices = tuple(
        device.model_copy(update={"memory_bytes": limit})
        for device, limit in zip(even.devices, (200, 300), strict=True)
    )
    small_front = even.model_copy(update={"devices": devices})
    # In front two micro-batches are in flight, so 200 bytes hold one layer.
    assert plan(profile, small_front, options).balance == (1, 3)


def test_the_gpipe_plan_holds_every_microbatch():
    profile = chain_profile([1, 1], saved_bytes=100)
    made = plan(profile, Cluster.uniform(2), PlanOptions(num_microbatches=5, schedule="gpipe"))
    assert [stage.memory.activations_bytes for stage in made.stages] == [500, 500]
    made = plan(profile, Cluster.uniform(2), num_microbatches=5)
    assert [stage.memory.activations_bytes for stage in made.stages] == [200, 100]


def test_one_stage_where_communication_costs_more_than_it_gains():
    profile = chain_profile([1e-3] * 4, forward_bytes=10**9)
    made = plan(profile, Cluster.uniform(4, bandwidth_bytes_per_s=1e9))
    assert made.balance == (4,)
    assert made.bubble_fraction == 0


def test_a_heavy_layer_is_left_alone():
    made = plan(chain_profile([1, 1, 1, 9]), Cluster.uniform(2), num_microbatches=8)
    assert made.balance == (3, 1)
    assert made.step_time_s == 3 + 8 * 27 + 6
    assert made.proof.status == "optimal"
    equal = made.baseline("equal_layers")
    assert equal.balance == (2, 2)
    assert equal.step_time_s > made.step_time_s


def test_what_the_profile_says_is_carried_over():
    profile = random_profile(1, 5)
    made = plan(profile, Cluster.uniform(2))
    assert made.profile_id == profile.content_id()
    assert (made.model, made.inputs, made.input_structure) == ("Random", profile.inputs, "x")
    assert made.boundaries == tuple(
        profile.boundaries[stage.first_layer - 1] for stage in made.stages[1:]
    )
    assert made.notes[0] == "made up"
    fqns = [fqn for stage in made.stages for fqn in stage.module_fqns]
    assert set(fqns) == {fqn for entry in profile.layers for fqn in entry.layer.module_fqns}
    assert all(len(set(stage.module_fqns)) == len(stage.module_fqns) for stage in made.stages)


def test_what_had_to_be_assumed_is_noted():
    profile = chain_profile([1, 1], parameter_bytes=8, saved_bytes=8)
    bare = type(profile).model_validate({**dict(profile), "parameters": (), "storages": ()})
    notes = " ".join(plan(bare, Cluster.uniform(2)).notes)
    assert "lists no parameters" in notes
    assert "lists no storages" in notes


def test_an_equal_cut_that_is_not_legal_has_no_time():
    profile = chain_profile([1, 1, 1, 1])
    gaps = (boundary(0), boundary(1, legal=False), boundary(2))
    profile = type(profile).model_validate({**dict(profile), "boundaries": gaps})
    made = plan(profile, Cluster.uniform(2))
    assert made.balance in ((1, 3), (3, 1))
    assert made.baseline("equal_layers").step_time_s is None
    assert "cannot be used" in str(made)


def test_exactly_so_many_stages_are_made():
    options = PlanOptions(num_stages=3)
    assert plan(chain_profile([1] * 6), Cluster.uniform(6), options).num_stages == 3
    with pytest.raises(Infeasible, match="7 stages need 7 devices"):
        plan(chain_profile([1] * 6), Cluster.uniform(6), PlanOptions(num_stages=7))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_there_may_be_more_stages_than_microbatches(num_microbatches):
    """torch's Schedule1F1B refuses them; our executor runs them, and the step is the shorter."""
    profile, cluster = chain_profile([1] * 6), Cluster.uniform(6)
    made = plan(profile, cluster, num_microbatches=num_microbatches)
    validate(made, profile, cluster)
    assert made.num_stages == (1 if num_microbatches == 1 else 6)
    for schedule in ("1f1b", "gpipe"):
        options = PlanOptions(num_stages=5, num_microbatches=num_microbatches, schedule=schedule)
        assert plan(profile, cluster, options).num_stages == 5


def test_num_microbatches_replaces_the_options_and_is_checked():
    profile = chain_profile([1, 1])
    made = plan(profile, Cluster.uniform(2), PlanOptions(optimizer="sgd"), num_microbatches=3)
    assert (made.num_microbatches, made.options.optimizer) == (3, "sgd")
    with pytest.raises(InvalidInput, match="num_microbatches"):
        plan(profile, Cluster.uniform(2), num_microbatches=0)


def test_layers_that_take_no_time_can_be_planned():
    made = plan(chain_profile([0, 0, 0]), Cluster.uniform(2))
    assert (made.step_time_s, made.proof.status) == (0, "optimal")
    validate(made, chain_profile([0, 0, 0]), Cluster.uniform(2))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_quick_bound_is_below_every_simulated_step(schedule):
    tight = 0
    for seed in range(150):
        draw = random.Random(seed)
        num_layers = draw.randrange(1, 9)
        num_stages = draw.randrange(1, num_layers + 1)
        options = PlanOptions(num_microbatches=draw.randrange(1, 12), schedule=schedule)
        profile = random_profile(seed, num_layers)
        devices = group_devices(random_cluster(seed, num_stages), options)
        cost_model = CostModel(chain_costs(profile, legal_positions(profile)), devices, options)
        inner = sorted(draw.sample(range(1, num_layers), num_stages - 1))
        assignment = place_in_device_order((0, *inner, num_layers), devices)
        costed = cost_model.evaluate_if_feasible(assignment)
        if costed is None:
            continue
        least_s = cost_model.least_step_s(assignment, costed.stages, costed.tied_sync_s)
        assert least_s <= costed.step_time_s * (1 + 1e-12)
        tight += math.isclose(least_s, costed.step_time_s, rel_tol=1e-9)
    assert tight > 50


def test_the_table_shows_what_matters():
    profile = random_profile(3, 12)
    text = str(plan(profile, random_cluster(1, 3, memory_bytes=200_000)))
    for word in (
        "stage",
        "memory",
        "limit",
        "sends",
        "step time",
        "bubble",
        "equal layer",
        "proof",
    ):
        assert word in text
    assert "gpu:2" in text


@pytest.mark.parametrize("text", ["1xcpu,1x24GB", "1x24GB,1xcpu", "2xcpu"])
def test_an_estimate_reserves_memory_of_gpus_beside_a_cpu(text):
    """Cause: the profile is of the first kind of device, and only that was looked at."""
    found = Provenance(source="estimated", device="cpu")
    profile = chain_profile([1e-3] * 4).model_copy(update={"provenance": found})
    reserves = plan(profile, text).options.reserves
    assert (reserves.context_bytes > 0) == ("GB" in text)
    assert (reserves.communication_bytes > 0) == ("GB" in text)
