"""An error that says what binds, with both numbers, and what would help at what price."""

import time

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner import remedies
from stagewright.planner.plan import plan
from stagewright.planner.remedies import with_devices
from tests.builders import chain_profile, random_profile
from tests.planner.instances import instance
from tests.planner.oracle import least


@pytest.fixture(autouse=True)
def ample(request, monkeypatch):
    """Time to finish every plan, however busy the machine."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(remedies, "BUDGET_S", 50)


def refused(profile, cluster, options):
    with pytest.raises(Infeasible) as caught:
        plan(profile, cluster, options)
    return caught.value


def texts(error):
    return [remedy.text for remedy in error.remedies]


def test_names_stage_layers_device_and_both_numbers():
    profile = chain_profile([1, 1, 1, 1], parameter_bytes=400)
    error = refused(profile, Cluster.uniform(2, memory_bytes=3000), PlanOptions(num_microbatches=4))
    assert (error.constraint, error.required, error.available) == ("memory", 3200, 3000)
    said = str(error)
    assert "(layers 0 to 1, 'layer.0' to 'layer.1') needs 3.1 KiB (3200 bytes)" in said
    assert "allows 2.9 KiB (3000 bytes)" in said
    assert texts(error) == ["optimizer='adamw_8bit'", "4 devices"]
    # Two stages of two layers: 2 x 6 + 3 x 6; four stages: 4 x 3 + 3 x 3.
    assert [remedy.step_time_s for remedy in error.remedies] == [30, 21]
    assert said.endswith(
        "it would fit with optimizer='adamw_8bit': 30 s per step, or 4 devices: 21 s per step"
    )


@pytest.mark.parametrize("seed", range(25))
def test_what_is_required_suffices_and_one_byte_less_does_not(seed):
    """The least of brute force, on equal devices."""
    given = instance(seed, num_stages=None, pins=(), memory_fraction=1.0)
    given = given.limited(0)
    error = refused(given.profile, given.cluster, given.options)
    assert error.constraint == "memory"
    assert error.required == least(given.limited(None), "memory").rank[0]
    enough = given.limited(error.required)
    assert plan(enough.profile, enough.cluster, enough.options)
    short = given.limited(error.required - 1)
    assert refused(short.profile, short.cluster, short.options).required == error.required


def test_unequal_devices_are_told_about_the_plan_that_misses_by_least():
    """The large device has room for more than its stage needs; the small one lacks."""
    profile = chain_profile([1, 1], parameter_bytes=1000)
    devices = (Device(name="large", memory_bytes=9000), Device(name="small", memory_bytes=10))
    cluster = Cluster(devices=devices, levels=(LinkLevel(group_size=2),))
    error = refused(profile, cluster, PlanOptions(num_stages=2))
    assert (error.required, error.available) == (4000, 10)
    assert "device 'small' allows" in str(error)


def test_cheapest_first_for_as_many_samples():
    profile = chain_profile([1] * 6, parameter_bytes=400, saved_bytes=1000, forward_bytes=50)
    options = PlanOptions(num_microbatches=8, schedule="gpipe")
    error = refused(profile, Cluster.uniform(2, memory_bytes=12000), options)
    assert {"schedule='1f1b'", "recompute='auto'"} <= set(texts(error))
    training = [remedy for remedy in error.remedies if remedy.options.num_microbatches < 8]
    devices = [remedy for remedy in error.remedies if "devices" in remedy.text]
    same = [remedy for remedy in error.remedies if remedy not in (*training, *devices)]
    assert list(error.remedies) == [*same, *training, *devices]
    for remedies_of_one_price in (same, training, devices):
        costs = [each.step_time_s / each.options.num_microbatches for each in remedies_of_one_price]
        assert costs == sorted(costs)


def test_fewer_microbatches_are_no_fewer_than_needed():
    profile = chain_profile([1] * 6, saved_bytes=1000)
    options = PlanOptions(num_microbatches=8, schedule="gpipe")
    cluster = Cluster.uniform(2, memory_bytes=7000)
    error = refused(profile, cluster, options)
    assert "num_microbatches=2" in texts(error)
    assert plan(profile, cluster, options, num_microbatches=2)
    assert refused(profile, cluster, options.model_copy(update={"num_microbatches": 4}))


def test_smaller_microbatches_are_offered_with_their_size():
    profile = chain_profile([1] * 4, saved_bytes=1000).model_copy(
        update={"inputs": random_profile(0, 1).inputs}  # two samples
    )
    options = PlanOptions(num_microbatches=8)
    error = refused(profile, Cluster.uniform(1, memory_bytes=2000), options)
    (remedy,) = [entry for entry in error.remedies if entry.options.batch_size]
    assert remedy.text == "batch_size=16 (micro-batches of 1)"
    assert remedy.step_time_s == 8 * 4 * 3


def test_a_fixed_number_of_stages_may_be_what_binds():
    profile = chain_profile([1] * 4, parameter_bytes=400)
    options = PlanOptions(num_microbatches=4, num_stages=1)
    error = refused(profile, Cluster.uniform(4, memory_bytes=3300), options)
    assert "any number of stages" in texts(error)
    too_many = PlanOptions(num_microbatches=4, num_stages=3)
    error = refused(profile, "2xcpu", too_many)
    assert error.constraint == "devices"
    assert {"any number of stages", "3 devices (3xcpu, 4 micro-batches)"} == set(texts(error))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_microbatch_takes_as_many_stages_as_memory_needs(schedule):
    """1F1B used to have no more stages than micro-batches."""
    profile = chain_profile([1, 1, 1, 1], parameter_bytes=400)
    options = PlanOptions(num_microbatches=1, schedule=schedule)
    assert plan(profile, Cluster.uniform(4, memory_bytes=1700), options).num_stages == 4
    error = refused(profile, Cluster.uniform(2, memory_bytes=1700), options)
    assert texts(error) == ["optimizer='sgd'", "4 devices"]


def test_two_changes_are_offered_where_none_alone_helps():
    profile = chain_profile([1] * 4, parameter_bytes=400, saved_bytes=5000, forward_bytes=10)
    options = PlanOptions(num_microbatches=8, optimizer="none")
    error = refused(profile, Cluster.uniform(1, memory_bytes=11900), options)
    assert texts(error) == ["recompute='auto' and 2 devices"]


def test_when_nothing_helps_it_says_so():
    profile = chain_profile([1], parameter_bytes=400)
    error = refused(profile, Cluster.uniform(1, memory_bytes=10), PlanOptions())
    assert error.remedies == ()
    assert "use devices with more memory" in str(error)
    assert "stage 0 (layer 0, 'layer.0')" in str(error)


def test_more_devices_keep_the_links():
    inside = LinkLevel(name="node", group_size=2)
    outside = LinkLevel(name="rack", group_size=4, latency_s=1.0)
    cluster = Cluster(
        devices=tuple(Device(name=f"d{index}") for index in range(3)), levels=(inside, outside)
    )
    more = with_devices(cluster, 7)
    assert len(more.devices) == 7
    assert [level.group_size for level in more.levels] == [2, 8]
    assert (more.link(0, 1).name, more.link(1, 6).name) == ("node", "rack")
    assert len(with_devices(Cluster(devices=(Device(name="one"),)), 3).devices) == 3


@pytest.mark.slow
def test_many_layers_are_answered_in_seconds():
    """After what is compiled on first use is compiled: with a tenth of the layers."""
    for num_layers in (20, 200):
        profile = chain_profile(
            [1e-3 * (1 + index % 5) for index in range(num_layers)],
            forward_bytes=10**6,
            parameter_bytes=4 * 10**6,
            saved_bytes=10**7,
        )
        cluster = Cluster.uniform(8, memory_bytes=5 * 10**6 * num_layers)
        begin = time.process_time()
        assert refused(profile, cluster, PlanOptions(num_microbatches=32)).remedies
        took_s = time.process_time() - begin
    assert took_s < 8
