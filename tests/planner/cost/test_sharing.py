"""Memory of replicas that share an optimizer's state, by hand."""

import random
from itertools import product

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.graph.graph import Parameter
from stagewright.core.plan.plan import MemoryUse, PlanOptions
from stagewright.core.profile.profile import Provenance
from stagewright.planner.cost.assignment import Assignment
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.cost.plan_cost import CostModel
from stagewright.planner.cost.sharing import check_gathering
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from stagewright.runtime.replicas.deadlock_check import can_finish, list_rounds
from stagewright.runtime.replicas.strategy import choose_strategies
from stagewright.schedules.make_schedule import make_schedule
from stagewright.schedules.plan_schedule import schedule_of
from stagewright.schedules.traits import ONE_STAGE_A_RANK
from tests.builders import chain_profile, random_profile

WEIGHTS, ELEMENTS = 4000, 1000
"""Of each of two layers, in float32."""


def made(
    strategies,
    devices=3,
    optimizer="adam",
    memory_bytes=None,
    autocast=None,
    bandwidth=1e12,
    **asked,
):
    profile = chain_profile([1.0, 1.0], parameter_bytes=WEIGHTS)
    profile = profile.model_copy(update={"provenance": Provenance(autocast=autocast)})
    cluster = Cluster.uniform(devices, memory_bytes=memory_bytes, bandwidth_bytes_per_s=bandwidth)
    options = PlanOptions(
        num_stages=1, max_replicas=None, strategies=strategies, optimizer=optimizer, **asked
    )
    found = plan(profile, cluster, options)
    validate(found, profile, cluster)
    return found.stages[0]


def test_zero1_divides_the_optimizers_state_but_for_the_largest_weight():
    stage = made(("replicate", "zero1"))
    assert stage.strategy == "zero1"
    assert stage.memory == MemoryUse(
        weights_bytes=2 * WEIGHTS,
        gradients_bytes=2 * WEIGHTS,
        optimizer_bytes=8000 + 2667,  # two moments of 1,000 elements, and a third of as many
    )


def test_fully_shard_holds_its_part_of_everything_and_one_layer_whole():
    """Whole weights and gradients were counted: 7B did not fit eight devices of 40 GB."""
    stage = made(("fully_shard",))
    assert stage.strategy == "fully_shard"
    assert stage.memory == MemoryUse(
        weights_bytes=2667,  # 8,000 of weights, as many of gradients and 16,000 of moments
        gradients_bytes=2667,
        optimizer_bytes=5333,  # rounded once, for the sum
        workspace_bytes=3 * WEIGHTS,  # a layer's weights, its gradient and that as it is summed
    )


def test_fully_shard_sends_weights_for_every_pass_and_gradients_for_every_backward():
    """A gathering is half of an all-reduce; by 6 micro-batches each of three replicas has two."""
    plain = made(("replicate",), num_microbatches=6, bandwidth=1e5).sync_time_s
    for recompute, passes in (("never", 2), ("always", 3)):
        stage = made(("fully_shard",), num_microbatches=6, recompute=recompute, bandwidth=1e5)
        sent = 2 * (passes * 2 * WEIGHTS + 2 * WEIGHTS) / 2
        assert stage.sync_time_s == pytest.approx(plain * sent / (2 * WEIGHTS), rel=1e-3)


def test_backwards_in_two_parts_hold_all_layers_whole():
    stage = made(("fully_shard",), devices=8, num_microbatches=8, schedule="zero_bubble")
    assert stage.memory.workspace_bytes == 4 * WEIGHTS + WEIGHTS  # both layers, one gradient twice


def test_frozen_weights_are_divided_and_those_of_several_layers_are_not():
    """A model with few trained weights needs hardly more than its share of the frozen ones."""
    profile = chain_profile([1.0] * 8, parameter_bytes=WEIGHTS)
    own = [
        Parameter(
            names=(f"w{at}",), size_bytes=WEIGHTS, numel=ELEMENTS, layers=(at,), trainable=at == 0
        )
        for at in range(8)
    ]
    tied = Parameter(names=("tied",), size_bytes=800, numel=200, layers=(1, 7))
    profile = profile.model_copy(update={"parameters": (*own, tied)})
    options = PlanOptions(
        num_stages=1, max_replicas=None, strategies=("fully_shard",), optimizer="adam"
    )
    cluster = Cluster.uniform(4, bandwidth_bytes_per_s=1e12)
    found = plan(profile, cluster, options)
    validate(found, profile, cluster)
    assert found.stages[0].memory == MemoryUse(
        weights_bytes=2 * WEIGHTS + 800,
        gradients_bytes=WEIGHTS // 4 + 800,
        optimizer_bytes=2 * WEIGHTS // 4 + 1600,
        workspace_bytes=3 * WEIGHTS,
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_plan_of_sharded_stages_is_what_is_counted_anew(seed):
    draw = random.Random(seed)
    profile = random_profile(seed, draw.choice([4, 7, 9]))
    options = PlanOptions(
        num_microbatches=draw.choice([4, 6, 7]),
        max_replicas=None,
        strategies=("fully_shard",),
        optimizer=draw.choice(["adam", "adamw_8bit", "sgd"]),
        precision="fp32",
        recompute=draw.choice(["never", "auto", "always"]),
        schedule=draw.choice(["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"]),
        objective=draw.choice(["step_time", "step_time", "memory"]),
    )
    options = options if options.schedule in ("1f1b", "gpipe") else options.model_copy(
        update={"objective": "step_time"})  # fmt: skip
    cluster = Cluster.uniform(4)
    validate(plan(profile, cluster, options), profile, cluster)


def test_zero1_is_taken_where_both_are_allowed():
    assert made(("replicate", "zero1", "fully_shard")).strategy == "zero1"


def test_replicas_do_not_share_where_that_would_hold_more():
    """There is no state to share; a layer of two that is whole, and its gradient, are too much."""
    for strategies in (("zero1",), ("fully_shard",)):
        stage = made(strategies, optimizer="sgd")
        assert stage.strategy == "replicate"
        assert stage.memory.total_bytes == 4 * WEIGHTS


def test_what_autocast_converts_is_not_the_optimizers_and_stays_whole():
    stage = made(("zero1",), autocast="bfloat16")
    assert stage.memory.weight_copies_bytes == 2 * 2 * ELEMENTS
    assert stage.memory.optimizer_bytes == 8000 + 2667


def test_one_device_has_nobody_to_share_with():
    assert made(("zero1",), devices=1).strategy == "single"


def test_exactly_enough_memory_works_and_a_byte_less_does_not():
    needed = made(("zero1",)).memory.total_bytes
    assert made(("zero1",), memory_bytes=needed).replicas == 3
    with pytest.raises(Infeasible):
        made(("replicate",), memory_bytes=needed)
    with pytest.raises(Infeasible):
        made(("zero1",), memory_bytes=needed - 1)


def test_strategies_of_replicas_that_no_stage_may_have_are_noted():
    """Said nothing before, and the plan looked as if the optimizer's state were shared."""
    profile, cluster = chain_profile([1.0, 1.0], parameter_bytes=WEIGHTS), Cluster.uniform(2)
    wanted = (
        "strategies=zero1 has no effect: no stage may have replicas; allow them with "
        "max_replicas=None"
    )
    for max_replicas in (1, 2):
        options = PlanOptions(strategies=("zero1",), max_replicas=max_replicas)
        assert (wanted in plan(profile, cluster, options).notes) == (max_replicas == 1)


SPREAD = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


@pytest.mark.parametrize("name", [*ONE_STAGE_A_RANK[:3], *SPREAD])
def test_replicas_that_would_wait_for_each_other_are_those_that_the_runtime_refuses(name):
    """zbv of 3 micro-batches on 2 replicas was planned, and then refused by the runtime."""
    refused = taken = 0
    for positions, replicas, count in product((1, 2, 3), (2, 3, 4), range(2, 13)):
        chunks = 2 if name in SPREAD else 1
        stages = positions * chunks
        options = PlanOptions(schedule=name, num_microbatches=count, strategies=("fully_shard",))
        if count < replicas:
            continue
        try:
            schedule = make_schedule(
                name, stages, count, replicas=(replicas,) * stages, chunks=chunks
            )
        except InvalidInput:
            continue  # unequal rounds
        meets = all(list_rounds(schedule, stage) for stage in range(stages)) and can_finish(
            schedule, range(stages), ()
        )
        try:
            check_gathering(options, replicas, positions)
        except InvalidInput:
            assert not meets, (positions, replicas, count)
            refused += 1
        else:
            assert meets, (positions, replicas, count)
            taken += 1
    assert taken > 5
    assert (refused > 5) == (name in SPREAD and name != "looped_bfs")


@pytest.mark.parametrize("schedule", SPREAD)
def test_plans_that_gather_weights_are_never_refused_by_the_runtime(schedule):
    shared = 0
    profile = chain_profile([1.0] * 10, parameter_bytes=WEIGHTS)
    names = [entry.layer.name for entry in profile.layers]
    for devices, count in product((3, 4), (4, 5, 7, 8)):
        options = PlanOptions(
            schedule=schedule,
            strategies=("fully_shard",),
            optimizer="adam",
            max_replicas=None,
            num_microbatches=count,
            num_stages=2,
            no_cut_after=(*names[:4], *names[5:9]),  # stages of five layers, which both share
        )
        cluster = Cluster.uniform(devices, bandwidth_bytes_per_s=1e9)
        found = plan(profile, cluster, options)
        shared += "fully_shard" in choose_strategies(found, schedule_of(found), None).values()
    assert shared > 1


def test_a_cut_of_replicas_that_would_wait_for_each_other_is_refused_by_name():
    options = PlanOptions(
        schedule="zbv", strategies=("fully_shard",), max_replicas=None, num_microbatches=3
    )
    model = CostModel(
        chain_costs(chain_profile([1.0, 1.0], parameter_bytes=WEIGHTS), (0, 1, 2)),
        group_devices(Cluster.uniform(2), options),
        options,
    )
    one = Assignment((0, 1, 2), (2, 2), (0, 0), (2, 2), (False, False), chunks=2)
    with pytest.raises(InvalidInput, match="use a multiple of 2 micro-batches"):
        model.stages(one)
