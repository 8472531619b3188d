"""Every entry of the cost tables, and the numbers they refuse."""

import pytest

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.cluster.collectives import AllReduceFigures
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.graph import Parameter
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import LossProfile, SavedStorage, Timing, list_parameters
from stagewright.planner.cost.assignment import place_in_device_order
from stagewright.planner.cost.chain import chain_costs
from stagewright.planner.cost.device_classes import group_devices
from stagewright.planner.cost.plan_cost import CostModel
from stagewright.planner.plan import plan
from tests.builders import boundary, chain_profile, random_profile

OPTIONS = PlanOptions(num_microbatches=3, optimizer="adam")


def changed(profile, **fields):
    return type(profile).model_validate({**dict(profile), **fields})


def costs_of(profile):
    return chain_costs(profile, range(len(profile.layers) + 1))


def pricer_of(profile, num_devices=4, **options):
    devices = group_devices(Cluster.uniform(num_devices, memory_bytes=100), OPTIONS)
    return CostModel(costs_of(profile), devices, OPTIONS.model_copy(update=options))


def stages_of(profile, cuts, **options):
    """The prices of stages on one device each."""
    cost_model = pricer_of(profile, **options)
    return cost_model.stages(place_in_device_order(cuts, cost_model.devices))


def tied_sync_s(profile, cuts):
    cost_model = pricer_of(profile)
    return cost_model.tied_sync_s(place_in_device_order(cuts, cost_model.devices))


@pytest.mark.parametrize("storages", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_interval_against_plain_sums(seed, storages):
    profile = random_profile(seed, 7, ties=2, storages=storages)
    costs = costs_of(profile)
    last_layer = len(profile.layers)
    for first in range(last_layer):
        for last in range(first + 1, last_layer + 1):
            inside = set(range(first, last))
            entries = profile.layers[first:last]
            loss = profile.loss if last == last_layer else None
            held = [item for item in profile.parameters if inside & set(item.layers)]
            learned = [item for item in held if item.kind == "parameter" and item.trainable]
            saved = (
                sum(item.size_bytes for item in profile.storages if inside & set(item.layers))
                if storages
                else sum(entry.saved_activation_bytes for entry in entries)
            )
            ends_with = loss.saved_activation_bytes if loss else 0
            at = first, last
            assert costs.forward_s[at] == pytest.approx(
                sum(entry.forward.median_s for entry in entries)
                + (loss.forward.median_s if loss else 0),
                rel=1e-14,
            )
            assert costs.backward_s[at] == pytest.approx(
                sum(entry.backward.median_s for entry in entries)
                + (loss.backward.median_s if loss else 0),
                rel=1e-14,
            )
            assert costs.recompute_s[at] == pytest.approx(
                sum(entry.forward.median_s for entry in entries), rel=1e-14
            )
            assert costs.weights_bytes[at] == sum(item.size_bytes for item in held)
            assert costs.gradients_bytes[at] == sum(item.size_bytes for item in learned)
            assert costs.learned_elements[at] == sum(item.numel for item in learned)
            assert costs.workspace_bytes[at] == max(entry.workspace_bytes for entry in entries)
            assert costs.saved_bytes[at] == saved + ends_with


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_layers_cost_what_their_layers_do(seed):
    profile = random_profile(seed, 9, ties=2)
    whole, edges = costs_of(profile), (0, 2, 3, 7, 9)
    grouped = chain_costs(profile, edges)
    for one, first in enumerate(edges):
        assert grouped.arriving_bytes[one] == whole.arriving_bytes[first]
        assert grouped.returning_bytes[one] == whole.returning_bytes[first]
        assert grouped.input_bytes[one] == whole.input_bytes[first]
        for other in range(one + 1, len(edges)):
            at, span = (one, other), (first, edges[other])
            for name in ("forward_s", "backward_s", "recompute_s"):
                expected = pytest.approx(getattr(whole, name)[span], rel=1e-14)
                assert getattr(grouped, name)[at] == expected
            for name in ("weights", "gradients", "saved", "workspace"):
                table = f"{name}_bytes"
                assert getattr(grouped, table)[at] == getattr(whole, table)[span]
            assert grouped.learned_elements[at] == whole.learned_elements[span]


def test_what_crosses_each_cut_and_what_the_model_reads():
    profile = random_profile(1, 6)
    costs, gaps = costs_of(profile), profile.boundaries
    assert costs.arriving_bytes.tolist() == [0, *(gap.forward_bytes for gap in gaps), 0]
    assert costs.returning_bytes.tolist() == [0, *(gap.backward_bytes for gap in gaps), 0]
    assert costs.input_bytes.tolist() == [64, *(gap.forward_bytes for gap in gaps), 0]


@pytest.mark.parametrize(("microbatches", "posted"), [(1, 1), (2, 2), (3, 2), (512, 2)])
def test_receive_buffers_are_those_that_are_posted(microbatches, posted):
    profile = changed(
        chain_profile([1, 1, 1]),
        boundaries=(
            boundary(0, forward_bytes=10, backward_bytes=4),
            boundary(1, forward_bytes=100, backward_bytes=40),
        ),
    )
    stages = stages_of(profile, (0, 1, 2, 3), num_microbatches=microbatches)
    buffers = [stage.memory.receive_buffers_bytes for stage in stages]
    assert buffers == [posted * 4, posted * (10 + 40), posted * 100]


def test_a_storage_kept_by_two_layers_counts_once():
    profile = changed(
        chain_profile([1, 1, 1]), storages=(SavedStorage(size_bytes=10, layers=(0, 2)),)
    )
    saved = costs_of(profile).saved_bytes
    assert [saved[0, 1], saved[1, 2], saved[2, 3], saved[0, 3]] == [10, 0, 10, 10]


def test_a_tied_weight_counts_once_a_stage_and_a_buffer_has_no_gradient():
    profile = changed(
        chain_profile([1, 1]),
        parameters=(
            Parameter(names=("head", "embedding"), size_bytes=40, numel=10, layers=(0, 1)),
            Parameter(names=("mean",), size_bytes=4, numel=1, layers=(0,), kind="buffer"),
            Parameter(names=("frozen",), size_bytes=8, numel=2, layers=(1,), trainable=False),
        ),
    )
    (stage,) = stages_of(profile, (0, 2))
    memory = stage.memory
    assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (52, 40, 80)


def test_a_profile_without_parameters_counts_its_layers_bytes_as_fp32_weights():
    profile = changed(chain_profile([1, 1], parameter_bytes=8), parameters=())
    (stage,) = stages_of(profile, (0, 2))
    memory = stage.memory
    assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (16, 16, 32)
    assert [entry.layers for entry in list_parameters(profile)] == [(0,), (1,)]


def test_a_small_layer_after_large_ones_keeps_all_its_digits():
    costs = costs_of(chain_profile([1e9, 1e-9 / 3]))
    assert costs.forward_s[1, 2] == 1e-9 / 3


def test_the_loss_belongs_to_whatever_stage_comes_last():
    loss = LossProfile(
        forward=Timing(median_s=5), backward=Timing(median_s=7), saved_activation_bytes=9
    )
    costs = costs_of(changed(chain_profile([1, 1]), loss=loss))
    assert (costs.forward_s[1, 2], costs.forward_s[0, 1]) == (6, 1)
    assert (costs.backward_s[0, 2], costs.saved_bytes[1, 2]) == (11, 9)


def test_tied_gradients_are_summed_over_the_stages_that_own_them():
    tied = Parameter(names=("tied",), size_bytes=1200, numel=300, layers=(0, 2))
    profile = changed(chain_profile([1, 1, 1, 1]), parameters=(tied,))
    link = Cluster.uniform(4).link(0, 1)
    assert tied_sync_s(profile, (0, 3, 4)) == 0
    assert tied_sync_s(profile, (0, 1, 2, 4)) == link.all_reduce_time_s(1200, 2)
    frozen = tied.model_copy(update={"trainable": False})
    assert tied_sync_s(changed(profile, parameters=(frozen,)), (0, 1, 4)) == 0


def test_sends_are_priced_by_the_link_between_the_two_devices():
    profile = changed(
        chain_profile([1, 1]), boundaries=(boundary(0, forward_bytes=100, backward_bytes=40),)
    )
    link = Cluster.uniform(4).link(0, 1)
    front, back = stages_of(profile, (0, 1, 2))
    assert (front.send_forward_s, front.send_backward_s) == (link.transfer_time_s(100), 0)
    assert (back.send_forward_s, back.send_backward_s) == (0, link.transfer_time_s(40))


def test_bytes_beyond_exact_sums_are_refused():
    profile = chain_profile([1], saved_bytes=2**58)
    with pytest.raises(InvalidInput, match="1 EiB"):
        plan(profile, Cluster.uniform(1), OPTIONS)


def test_times_beyond_reason_are_refused():
    with pytest.raises(InvalidInput, match="times add up to"):
        plan(chain_profile([1e300, 1e300]), Cluster.uniform(1), OPTIONS)


def test_links_too_slow_to_count_are_refused():
    profile = chain_profile([1, 1], forward_bytes=1000)
    cluster = Cluster.uniform(2, bandwidth_bytes_per_s=1e-320)
    with pytest.raises(InvalidInput, match="would take inf s to send"):
        plan(profile, cluster, OPTIONS)


def test_sums_too_slow_for_any_number_of_devices_are_refused():
    """All eight sum fast; two of them would take 10^13 seconds."""
    profile = chain_profile([1, 1], parameter_bytes=10**13)
    figures = AllReduceFigures(bandwidth=((2, 1), (8, 1e12)))
    level = LinkLevel(group_size=8, all_reduce=figures)
    cluster = Cluster.uniform(8).model_copy(update={"levels": (level,)})
    with pytest.raises(InvalidInput, match=r"would take .* s to send"):
        plan(profile, cluster, OPTIONS)
