"""Devices and links."""

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput
from tests.builders import two_level_cluster


def test_the_innermost_level_that_joins_two_devices_is_their_link():
    cluster = two_level_cluster(4)
    assert cluster.link(0, 1).name == cluster.link(2, 3).name == "pair"
    assert cluster.link(1, 2).name == cluster.link(0, 3).name == "rack"
    with pytest.raises(InvalidInput, match="not joined"):
        cluster.link(0, 99)


def test_levels_must_nest_and_join_everything():
    devices = tuple(Device(name=str(index)) for index in range(4))
    for sizes, said in (([2], "must join all 4"), ([2, 3], "multiple"), ([4, 2], "multiple")):
        levels = tuple(LinkLevel(group_size=size) for size in sizes)
        with pytest.raises(ValueError, match=said):
            Cluster(devices=devices, levels=levels)
    with pytest.raises(ValueError, match="unique"):
        Cluster(devices=(devices[0], devices[0]), levels=(LinkLevel(group_size=2),))


def test_a_message_takes_latency_and_bytes_over_bandwidth_and_nothing_if_empty():
    link = LinkLevel(group_size=2, latency_s=1.0, bandwidth_bytes_per_s=10.0)
    assert link.transfer_time_s(20) == 3.0
    assert link.transfer_time_s(0) == 0.0


def test_a_ring_all_reduce_sends_twice_all_parts_but_one():
    link = LinkLevel(group_size=4, latency_s=1.0, bandwidth_bytes_per_s=10.0)
    assert link.all_reduce_time_s(40, 4) == 6 * (1.0 + 1.0)
    assert link.all_reduce_time_s(40, 1) == 0.0
    faster = link.model_copy(update={"all_reduce_bandwidth_bytes_per_s": 20.0})
    assert faster.all_reduce_time_s(40, 2) == 2 * (1.0 + 1.0)


def test_an_all_reduce_passes_over_a_level_that_counts_single_devices():
    """Pairs in sixes that hold unequal numbers of the kind: the outer ring takes the pairs' halves.

    It divided by zero.
    """
    levels = tuple(
        LinkLevel(group_size=size, latency_s=0, bandwidth_bytes_per_s=bandwidth)
        for size, bandwidth in ((2, 100), (6, 50), (12, 10))
    )
    cluster = Cluster(devices=Cluster.uniform(12).devices, levels=levels)
    inside_s, outside_s = 2 * 0.5 * 60 / 100, 2 * (2 / 3) * 30 / 10
    assert cluster.all_reduce_time_s(60, 6, 2, (2, 1, 6)) == pytest.approx(inside_s + outside_s)
    assert cluster.all_reduce_time_s(60, 2, 0, (2, 1, 6)) == pytest.approx(inside_s)
