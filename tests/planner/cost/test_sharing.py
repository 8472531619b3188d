"""Memory of replicas that share an optimizer's state, by hand."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import MemoryUse, PlanOptions
from stagewright.core.profile.profile import Provenance
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile

WEIGHTS, ELEMENTS = 4000, 1000
"""Of each of two layers, in float32."""


def made(strategies, devices=3, optimizer="adam", memory_bytes=None, autocast=None, **asked):
    profile = chain_profile([1.0, 1.0], parameter_bytes=WEIGHTS)
    profile = profile.model_copy(update={"provenance": Provenance(autocast=autocast)})
    cluster = Cluster.uniform(devices, memory_bytes=memory_bytes, bandwidth_bytes_per_s=1e12)
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


def test_fully_shard_holds_its_part_of_the_weights_beside_the_gathered_ones():
    stage = made(("fully_shard",))
    assert stage.strategy == "fully_shard"
    assert stage.memory.weights_bytes == 2 * WEIGHTS + 2667
    assert stage.memory.total_bytes == 4 * WEIGHTS + 8000  # (8,000 + 16,000) / 3


def test_zero1_is_taken_where_both_are_allowed():
    assert made(("replicate", "zero1", "fully_shard")).strategy == "zero1"


def test_replicas_do_not_share_where_that_would_hold_more():
    """There is no state to share, and a part of the weights would come on top."""
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
