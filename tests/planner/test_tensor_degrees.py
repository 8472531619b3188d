"""Layers split over several devices: costs by hand, placement, and the choice of the number."""

import math
from fractions import Fraction

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.cluster.collectives import AllReduceFigures
from stagewright.core.errors import Infeasible, InvalidInput, PlanMismatch
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import SplitLayer, TensorSplit
from stagewright.core.profile.scale import scale_profile
from stagewright.planner.explain import explain
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.problem.split_layers import group_devices, split_costs
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile

NODE = LinkLevel(name="node", latency_s=1e-3, bandwidth_bytes_per_s=1e6)
NETWORK = LinkLevel(name="network", latency_s=1e-2, bandwidth_bytes_per_s=1e5)

HALF = SplitLayer(
    compute_share=0.5,
    parameter_bytes=2000,
    saved_activation_bytes=600,
    forward_reduced_bytes=1000,
    forward_reductions=1,
    backward_reduced_bytes=3000,
    backward_reductions=2,
    backward_gathered_bytes=4000,
    gathers=1,
)


def make_profile(num_layers=2, splits=None):
    profile = chain_profile([1.0] * num_layers, parameter_bytes=4000, saved_bytes=1000)
    split = TensorSplit(degree=2, layers=(HALF,) * num_layers)
    return profile.model_copy(update={"splits": (split,) if splits is None else splits})


def make_cluster(nodes=2, devices=2, memory_bytes=None):
    return Cluster.of_nodes(nodes, devices, inside=NODE, between=NETWORK, memory_bytes=memory_bytes)


def planned(cluster, profile=None, **asked):
    profile = profile or make_profile()
    found = plan(profile, cluster, PlanOptions(num_microbatches=4, optimizer="none", **asked))
    validate(found, profile, cluster)
    return found


def test_times_and_bytes_of_one_of_two_devices():
    found = planned(make_cluster(1), tensor=2)
    (stage,) = found.stages
    assert stage.devices == ("device:0", "device:1")
    assert (stage.replicas, stage.tensor, stage.strategy) == (1, 2, "single")
    product_s = 0.5 * (1 + 0.025)
    # An all-reduce of two devices is two messages of half the bytes.
    reduced_s = 2 * 1e-3 + 1000 / 1e6
    assert math.isclose(stage.forward_time_s, 2 * (product_s + reduced_s))
    # Two all-reduces of 3,000 bytes together, and a gather: one message of half of 4,000.
    backward_s = 2 * 2 * 1e-3 + 3000 / 1e6 + 1e-3 + 2000 / 1e6
    assert math.isclose(stage.backward_time_s, 2 * (2 * product_s + backward_s))
    assert stage.memory.weights_bytes == 2 * 2000
    assert stage.memory.activations_bytes == 2 * 600


def test_collectives_of_split_layers_are_priced_by_size_and_number():
    """Every call by the faster protocol for its own size, a gather as half of a sum."""
    figures = AllReduceFigures(
        start_s=0.01,
        step_s=0.002,
        small_share=0.1,
        large_start_s=0.03,
        large_step_s=0.004,
        bandwidth=((2, 1e6), (4, 4e6)),
    )
    cluster = make_cluster(1)
    level = cluster.levels[0].model_copy(update={"all_reduce": figures})
    cluster = cluster.model_copy(update={"levels": (level,)})
    found = planned(cluster, tensor=2)
    product_s = 0.5 * (1 + 0.025)
    small_s = 0.012 + 1000 / 1e5  # the large one takes 35 ms, 35.5 for 1,500 bytes, 38 for 4,000
    assert math.isclose(found.stages[0].forward_time_s, 2 * (product_s + small_s))
    backward_s = 2 * (0.012 + 1500 / 1e5) + (0.034 + 4000 / 1e6) / 2
    assert math.isclose(found.stages[0].backward_time_s, 2 * (2 * product_s + backward_s))


def test_a_group_lies_in_one_node_and_its_devices_are_next_to_each_other():
    found = planned(make_cluster(), tensor=2, max_replicas=None)
    for stage in found.stages:
        for replica in range(stage.replicas):
            one, other = (int(name.split(":")[1]) for name in stage.devices_of(replica))
            assert (one % 2, other) == (0, one + 1)
    assert found.cluster_devices == 4
    assert plan_timeline(found).step_time_s == found.step_time_s


def test_what_a_node_has_left_over_stays_idle():
    found = planned(make_cluster(2, 3), tensor=2)
    assert [stage.devices for stage in found.stages] == [
        ("device:0", "device:1"),
        ("device:3", "device:4"),
    ]


def test_auto_takes_the_faster_number_and_says_what_the_others_take():
    found = planned(make_cluster(1), profile=make_profile(1), tensor="auto")
    assert found.options.tensor == found.stages[0].tensor == 2
    assert any("tensor=2 was chosen" in note and "1: 12 s" in note for note in found.notes)
    slow = LinkLevel(name="node", latency_s=0.5, bandwidth_bytes_per_s=1e6)
    cluster = Cluster.of_nodes(1, 2, inside=slow, between=NETWORK)
    assert planned(cluster, profile=make_profile(1), tensor="auto").stages[0].tensor == 1


def test_the_bound_is_of_every_number():
    alone = [planned(make_cluster(), tensor=degree) for degree in (1, 2)]
    both = planned(make_cluster(), tensor="auto")
    assert both.step_time_s == min(found.step_time_s for found in alone)
    bounds = [found.proof.simulated_lower_bound_s for found in alone]
    assert both.proof.simulated_lower_bound_s <= min(bounds) * (1 + 1e-12)


def test_devices_are_counted_one_by_one():
    found = planned(make_cluster(), tensor=2, objective="devices")
    assert (found.proof.value, found.proof.lower_bound) == (2, 2)


def test_exactly_enough_memory_works_and_a_byte_less_does_not():
    needed = max(planned(make_cluster(1), tensor=2).memory_by_device().values())
    assert planned(make_cluster(1, memory_bytes=needed), tensor=2)
    with pytest.raises(Infeasible, match="with tensor=2, where each device stands for 2"):
        planned(make_cluster(1, memory_bytes=needed - 1), tensor=2)


def test_what_does_not_fit_whole_is_split():
    cluster = make_cluster(1, memory_bytes=10_000)
    assert planned(cluster, profile=make_profile(1), tensor="auto").stages[0].tensor == 2
    with pytest.raises(Infeasible):
        planned(make_cluster(1, memory_bytes=4_000), profile=make_profile(1), tensor=1)


def test_a_shared_connection_is_shared_by_the_devices_of_a_group():
    shared = NETWORK.model_copy(update={"shared": True})
    cluster = Cluster.of_nodes(2, 2, inside=NODE, between=shared)
    grouped, members = group_devices(cluster, 2)
    assert members == {
        "device:0": ("device:0", "device:1"),
        "device:2": ("device:2", "device:3"),
    }
    (level,) = grouped.levels
    assert level.bandwidth_bytes_per_s == NETWORK.bandwidth_bytes_per_s / 2


def test_profiles_that_name_no_splits_are_planned_whole_and_say_so():
    made = planned(make_cluster(), profile=make_profile(splits=()), tensor="auto")
    assert made.stages[0].tensor == 1
    assert made.notes[-1].startswith("tensor=1: the profile names no layers that split")
    split = planned(make_cluster(), tensor=2)
    with pytest.raises(PlanMismatch, match="does not say how layers split over 2 devices"):
        validate(split, make_profile(splits=()), make_cluster())


def test_scaled_profiles_keep_what_is_divided():
    profile = make_profile()
    (split,) = profile.splits
    profile = profile.model_copy(
        update={
            "inputs": (TensorSpec(name="x", shape=(2, 4), dtype="float32"),),
            "splits": (split.model_copy(update={"divided": ("x", "y")}),),
        }
    )
    assert scale_profile(profile, Fraction(2)).splits[0].divided == ("x", "y")


def test_unknown_degrees_and_unlike_devices_are_refused_by_name():
    with pytest.raises(InvalidInput, match="tensor=4 devices; it knows 2"):
        planned(make_cluster(1, 4), tensor=4)
    with pytest.raises(InvalidInput, match=r"'stagewright estimate' find out.*graph file"):
        planned(make_cluster(), profile=make_profile(splits=()), tensor=2)
    with pytest.raises(InvalidInput, match="needs 4 equal devices"):
        planned(make_cluster(), tensor=4)
    devices = tuple(Device(name=str(speed), speed=speed) for speed in (1.0, 2.0))
    with pytest.raises(InvalidInput, match="devices of one speed"):
        planned(Cluster(devices=devices, levels=(NODE,)), tensor=2)


def test_a_wrong_group_is_found():
    cluster, profile = make_cluster(), make_profile()
    found = planned(cluster, tensor=2)
    stage = found.stages[0].model_copy(update={"devices": ("device:1", "device:2")})
    broken = found.model_copy(update={"stages": (stage, *found.stages[1:])})
    with pytest.raises(PlanMismatch, match="are not all in one innermost group"):
        validate(broken, profile, cluster)
    stage = found.stages[0].model_copy(update={"tensor": 1, "devices": ("device:0",)})
    broken = found.model_copy(update={"stages": (stage, *found.stages[1:])})
    with pytest.raises(PlanMismatch, match="tensor is 1, expected 2"):
        validate(broken, profile, cluster)


def test_the_best_of_several_numbers_gets_the_rest_of_the_time():
    found = planned(make_cluster(), tensor="auto", schedule="1f1b")
    profile = make_profile()
    again = plan(profile, make_cluster(), found.options, deadline_s=60)
    assert again.step_time_s == found.step_time_s


def test_explain_says_what_splitting_layers_buys():
    cluster, profile = make_cluster(1), make_profile(1)
    found = planned(cluster, profile=profile, tensor=2)
    study = explain(found, profile, cluster)
    (row,) = study.dimensions
    assert row.text == "tensor 2 instead of 1 (then 1 device)"
    alone = planned(cluster, profile=profile, tensor=1)
    assert row.step_time_s == alone.step_time_s
    # Four micro-batches of one layer: collectives by hand, as in the first test.
    assert math.isclose(row.all_reduce_s, 4 * (3e-3 + 4e-3 + 3e-3 + 3e-3))
    parts = row.compute_s + row.all_reduce_s + row.waiting_s + row.messages_s + row.gradients_s
    assert math.isclose(parts, found.step_time_s - alone.step_time_s)
    assert row.memory_bytes < 0
    assert "tensor 2 instead of 1 (then 1 device): +52 ms of all-reduce, −5.85 s of compute" in str(
        study
    )
    assert any(entry.text == "2 more devices" for entry in study.alternatives)


def test_explain_compares_each_dimension_that_a_plan_has():
    cluster, profile = make_cluster(2, 4), make_profile(4)
    options = PlanOptions(
        num_microbatches=8, tensor=2, max_replicas=2, num_stages=2, strategies=("zero1",)
    )
    found = plan(profile, cluster, options)
    assert {stage.replicas for stage in found.stages} == {2}
    rows = {entry.text: entry for entry in explain(found, profile, cluster).dimensions}
    assert list(rows) == [
        "tensor 2 instead of 1 (then 4 stages, zero_bubble)",
        "up to 2 replicas instead of 1 (then 4 devices)",
        "zero1 instead of replicate",
    ]
    shared = rows["zero1 instead of replicate"]
    assert shared.step_time_s == found.step_time_s
    # Of two layers' moments, 4,000 bytes each on a shard, one is whole and one is halved.
    assert shared.memory_bytes == -2000


def test_a_given_balance_is_priced_on_groups():
    cluster, profile = make_cluster(), make_profile(4)
    options = PlanOptions(num_microbatches=4, tensor=2)
    made = plan_from_balance(profile, cluster, options, (2, 2))
    validate(made, profile, cluster)
    assert [stage.tensor for stage in made.stages] == [2, 2]
    assert made.stages[1].devices == ("device:2", "device:3")
    with pytest.raises(InvalidInput, match="give a number"):
        plan_from_balance(profile, cluster, options.model_copy(update={"tensor": "auto"}), (2, 2))


def test_layers_that_are_not_split_are_named_with_the_reason():
    whole = SplitLayer(parameter_bytes=4000, reasons=("7 heads",))
    splits = (TensorSplit(degree=2, layers=(HALF, whole)),)
    found = planned(make_cluster(1), profile=make_profile(2, splits), tensor=2)
    assert found.notes[-1] == (
        "1 of 2 layers are not split, and done by every device of a group: layer.1 (7 heads)"
    )


def test_layers_that_are_split_in_part_are_named_with_the_reason():
    mostly = HALF.model_copy(update={"compute_share": 0.54, "reasons": ("small",)})
    some = HALF.model_copy(update={"compute_share": 0.59, "reasons": ("cumsum has no rule",)})
    splits = (TensorSplit(degree=2, layers=(HALF, mostly, some)),)
    found = planned(make_cluster(1), profile=make_profile(3, splits), tensor=2)
    assert found.notes[-1] == (
        "1 of 3 layers are split in part, and each device does more than 0.5 of their work: "
        "layer.2 (0.59: cumsum has no rule)"
    )


def test_a_reason_is_never_empty():
    whole, some = SplitLayer(parameter_bytes=4000), HALF.model_copy(update={"compute_share": 0.7})
    splits = (TensorSplit(degree=2, layers=(HALF, whole, some)),)
    found = planned(make_cluster(1), profile=make_profile(3, splits), tensor=2)
    assert found.notes[-2].endswith("layer.1 (it has no product to divide)")
    assert found.notes[-1].endswith("layer.2 (0.70: what is around its products is not split)")


def test_a_device_sends_its_part_of_what_is_divided():
    hidden = TensorSpec(name="x", shape=(2, 6, 4), dtype="float32", requires_grad=True)
    profile = chain_profile([1.0] * 2)
    (gap,) = profile.boundaries
    profile = profile.model_copy(
        update={"boundaries": (gap.model_copy(update={"tensors": (hidden,)}),)}
    )
    split = TensorSplit(degree=2, layers=(HALF, HALF), divided=("x",))
    for divided, size in ((("x",), hidden.size_bytes // 2), ((), hidden.size_bytes)):
        own = split.model_copy(update={"divided": divided})
        (gap,) = split_costs(profile, own, Cluster.uniform(2)).boundaries
        assert gap.forward_bytes == size


def test_devices_in_no_group_and_links_of_one_group_are_noted():
    profile = make_profile(4)
    made = plan(profile, Cluster.parse("5xcpu"), PlanOptions(num_microbatches=4, tensor=2))
    assert "1 device left idle, in no group of 2 equal neighbours: cpu:4" in made.notes
    links = [note for note in made.notes if "links" in note or "link" in note]
    assert len(links) == 1
    one = plan(profile, Cluster.parse("2xcpu"), PlanOptions(num_microbatches=4, tensor=2))
    assert [note for note in one.notes if "link" in note] == links
