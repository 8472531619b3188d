"""An error that says what binds, with both numbers, and what would help."""

import re

import pytest

from stagewright.core.cluster import Cluster
from stagewright.core.errors import Infeasible
from stagewright.core.plan import PlanOptions
from stagewright.planner.plan import plan
from tests.builders import chain_profile


def message(profile, cluster, options):
    with pytest.raises(Infeasible) as caught:
        plan(profile, cluster, options)
    assert caught.value.constraint == "memory"
    assert caught.value.required > caught.value.available
    return str(caught.value)


def test_names_stage_layers_device_and_both_numbers():
    profile = chain_profile([1, 1, 1, 1], parameter_bytes=400)
    said = message(profile, Cluster.uniform(2, memory_bytes=3000), PlanOptions(num_microbatches=4))
    assert "stage 0 (layers 0 to 1, 'layer.0' to 'layer.1') needs" in said
    assert "(3200 bytes)" in said
    assert "device 'device:0' allows" in said
    assert "(3000 bytes)" in said
    assert said.endswith("it would fit with optimizer='sgd', or 4 devices")


def test_every_way_out_it_names_works():
    profile = chain_profile([1] * 6, parameter_bytes=400, saved_bytes=1000, forward_bytes=50)
    cluster = Cluster.uniform(2, memory_bytes=9000)
    options = PlanOptions(num_microbatches=8, schedule="gpipe", optimizer="adam")
    said = message(profile, cluster, options)
    fewer = int(re.search(r"num_microbatches=(\d+)", said)[1])
    assert plan(profile, cluster, options, num_microbatches=fewer)
    with pytest.raises(Infeasible):
        plan(profile, cluster, options, num_microbatches=2 * fewer)
    more = re.search(r"(\d+) devices", said)
    if more:
        assert plan(profile, Cluster.uniform(int(more[1]), memory_bytes=9000), options)
    if "schedule='1f1b'" in said:
        assert plan(profile, cluster, options.model_copy(update={"schedule": "1f1b"}))


def test_a_fixed_number_of_stages_may_be_what_binds():
    profile = chain_profile([1] * 4, parameter_bytes=400)
    options = PlanOptions(num_microbatches=4, num_stages=1)
    said = message(profile, Cluster.uniform(4, memory_bytes=3300), options)
    assert "any number of stages" in said


def test_1f1b_may_need_more_microbatches_for_more_stages():
    """Four stages would fit, but need four micro-batches, and on two devices four devices too."""
    profile = chain_profile([1, 1, 1, 1], parameter_bytes=400)
    options = PlanOptions(num_microbatches=1)
    for num_devices, way_out in (
        (4, "num_microbatches=4"),
        (2, "4 devices and num_microbatches=4"),
    ):
        said = message(profile, Cluster.uniform(num_devices, memory_bytes=1700), options)
        assert said.endswith(f"it would fit with {way_out}")
    assert plan(profile, Cluster.uniform(4, memory_bytes=1700), options, num_microbatches=4)


def test_no_way_out_asks_for_more_stages_than_1f1b_takes():
    profile = chain_profile([1] * 4, parameter_bytes=400, saved_bytes=400)
    # One micro-batch would fit 2100 bytes, but 1F1B does not take four stages then.
    for schedule, is_named in (("gpipe", True), ("1f1b", False)):
        options = PlanOptions(num_microbatches=4, num_stages=4, schedule=schedule)
        said = message(profile, Cluster.uniform(4, memory_bytes=2100), options)
        assert ("num_microbatches=1" in said) == is_named
    # The last stage keeps fewer micro-batches by 1F1B: named with four of them, not with three.
    for num_microbatches, is_named in ((4, True), (3, False)):
        needed = 800 + 400 * num_microbatches
        devices = tuple(
            device.model_copy(update={"memory_bytes": limit})
            for device, limit in zip(Cluster.uniform(4).devices, [needed] * 3 + [1200], strict=True)
        )
        cluster = Cluster.uniform(4).model_copy(update={"devices": devices})
        options = PlanOptions(
            num_microbatches=num_microbatches, num_stages=4, schedule="gpipe", optimizer="none"
        )
        assert ("schedule='1f1b'" in message(profile, cluster, options)) == is_named


def test_when_nothing_helps_it_says_so():
    profile = chain_profile([1], parameter_bytes=400)
    said = message(profile, Cluster.uniform(1, memory_bytes=10), PlanOptions())
    assert "use devices with more memory" in said
    assert "stage 0 (layer 0, 'layer.0')" in said
